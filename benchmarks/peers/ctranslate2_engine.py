"""CTranslate2, a decoding engine in C++: the run's weights, converted by `qkv export`, in each of its precisions."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from qkv.core.errors import UsageError
from qkv.core.tokenizer import EOS
from qkv.data.subwords import unique_names
from qkv.interop import import_optional
from qkv.interop.ctranslate2 import to_ctranslate2
from qkv.lab.contenders import DecodeFunction, DecodingSetup, DecodingTask, Outputs, Setting, Sources

ENGINE, PACKAGE = "CTranslate2", "ctranslate2"


def decoding(device: torch.device, threads: int) -> list[Setting]:
    """Return its settings: on a CPU also several replicas that share the threads."""
    if device.type != "cpu":
        return [
            Setting(ENGINE, dtype, partial(_open, dtype=dtype, replicas=1, threads=1), exact=dtype == "float32")
            for dtype in ("float32", "bfloat16", "int8_bfloat16")
        ]
    available = []
    for dtype in ("float32", "int8"):
        for replicas in sorted({1, threads}):
            how = f"{dtype}, {replicas} × {threads // replicas}"
            opened = partial(_open, dtype=dtype, replicas=replicas, threads=threads // replicas)
            available.append(Setting(ENGINE, how, opened, exact=dtype == "float32"))
    return available


def _open(subject: DecodingSetup, dtype: str, replicas: int, threads: int) -> DecodeFunction:
    package = import_optional(PACKAGE)
    device, ours = subject.device.type, torch.get_num_threads()
    try:
        if dtype not in package.get_supported_compute_types(device):
            raise UsageError(f"ctranslate2 does not support {dtype} on this {device}")
        translator = package.Translator(
            str(_converted(subject)),
            device=device,
            device_index=subject.device.index or 0,
            compute_type=dtype,
            inter_threads=replicas,
            intra_threads=threads,
        )
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"ctranslate2 cannot use this {device}: {error}") from None
    finally:
        torch.set_num_threads(ours)  # ctranslate2 shares OpenMP with torch and changes its number of threads
    names = unique_names(subject.run.tokenizers.src)
    ids = {name: token for token, name in enumerate(unique_names(subject.run.tokenizers.tgt))}

    def decode(sources: Sources, task: DecodingTask) -> Outputs:
        results = translator.translate_batch(
            [[names[token] for token in (*source, EOS)] for source in sources],
            max_batch_size=task.batch,
            beam_size=task.beam,
            num_hypotheses=task.n_best,
            length_penalty=0.0,
            max_input_length=0,
            min_decoding_length=0,
            max_decoding_length=max(map(len, sources)) + task.extra,
            return_end_token=True,
        )
        return [[[ids[name] for name in tokens] for tokens in each.hypotheses] for each in results]

    return decode


def _converted(subject: DecodingSetup) -> Path:
    """Return the folder with the weights in CTranslate2's format, written once for all settings."""
    folder = subject.folder / "ctranslate2"
    if not folder.exists():
        to_ctranslate2(subject.model, subject.run.tokenizers, folder)
    return folder
