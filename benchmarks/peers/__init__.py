"""Other software that `qkv lab speed` measures beside qkv, on the same weights.

Each module is one peer. `PACKAGE` names what it needs; `training()` returns its contenders, `decoding(device, threads)`
its settings; a module without one of the two is not measured there. A contender or setting whose package is missing
raises `UsageError`, and the table says so.
"""
