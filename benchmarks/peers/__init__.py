"""Other software that `qkv lab speed` measures beside qkv, on the same weights.

Each module is one peer, unless its name begins with an underscore. `PACKAGE` names what it needs; `training()` and
`decoding(device, threads)` return its settings; a module without one of the two is not measured there. A setting whose
package is missing raises `UsageError`, and the table says so.
"""
