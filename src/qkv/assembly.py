"""From a config to functions: the one place that maps options to a model, a task, a training step and a run folder.

A part that only some options need is imported in the branch that chooses it.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qkv.core import run as core_run
from qkv.core.batches import Updates, UpdateStream
from qkv.core.dataset import PreparedText
from qkv.core.device import ALONE, World, choose_device
from qkv.core.errors import UsageError
from qkv.core.loss import SmoothedObjective
from qkv.core.optimizer import ConfigSchedule, build_optimizer
from qkv.core.search import StartSearch
from qkv.core.tokenizer import TokenizerPair
from qkv.core.trainer import Objective, PlainTrainStep, Trainer
from qkv.core.transformer import Layers, Model, Transformer
from qkv.core.validation import Task, TranslationTask, corpus_bleu
from qkv.data.pair_updates import PairUpdates
from qkv.options import (
    AttentionModelConfig,
    Config,
    ConvS2SConfig,
    DecoderOnlyConfig,
    EncoderOnlyConfig,
    ModelConfig,
    RnnConfig,
    TrainConfig,
    TransformerConfig,
    TranslationConfig,
)
from qkv.segmentation.text_cutter import LineStatistics, TextCutter
from qkv.training import distributed, unpadded
from qkv.training.distributed import ShardedTrainStep
from qkv.training.memory_limits import MemoryLimitedStep, recompute_layers
from qkv.training.unpadded import loss_in_parts
from qkv.worker_pool import ProcessWorkers

if TYPE_CHECKING:
    from qkv.decoding.search_request import DecodingEngine
    from qkv.engines.cpu.native_search import OpenedRun

LOCKED = (errno.EWOULDBLOCK, errno.EACCES)  # another process holds the lock; other errors: locks do not work here
UPDATES_AHEAD = 4  # made before they are needed

# ---- model and run folder --------------------------------------------------------------------------------------------


def build_model(config: ModelConfig, src_vocab: int, tgt_vocab: int) -> Any:
    """The model of a config, freshly initialised from torch's random state."""
    model = _plain_model(config, src_vocab, tgt_vocab)
    unpadded.use_short_dropout(model)
    if torch.cuda.is_available():
        from qkv.engines.cuda_decoding.fused_modules import use_fused_modules

        return use_fused_modules(model)
    return model


def _plain_model(config: ModelConfig, src_vocab: int, tgt_vocab: int) -> Model:
    match config:
        case TransformerConfig():
            kind = Transformer if unpadded.supports(config) else unpadded.UnpaddedTransformer
            return kind(config, src_vocab, tgt_vocab, layers_for(config))
        case DecoderOnlyConfig():
            from qkv.models.variants import DecoderOnly

            return DecoderOnly(config, tgt_vocab, layers_for(config))
        case EncoderOnlyConfig():
            from qkv.models.variants import EncoderOnly

            return EncoderOnly(config, tgt_vocab, layers_for(config))
        case RnnConfig():
            from qkv.models.rnn import Rnn

            return Rnn(config, src_vocab, tgt_vocab)
        case ConvS2SConfig():
            from qkv.models.convs2s import ConvS2S

            return ConvS2S(config, src_vocab, tgt_vocab)
    raise TypeError(f"no model for {type(config).__name__}")


def layers_for(config: AttentionModelConfig) -> Layers:
    """Return the constructors of the layers: the paper's, unless an option selects variants."""
    added = [spec for spec in dataclasses.fields(config) if spec.name not in Layers.implemented]
    if config.positions == "sinusoidal" and all(getattr(config, s.name) == s.default for s in added):
        return Layers(config)
    from qkv.models.variants import VariantLayers

    return VariantLayers(config)


def parameters(spec: ModelConfig, tokenizers: TokenizerPair) -> int:
    """Return the number of parameters of a model, without allocating them."""
    with torch.device("meta"):
        return parameter_count(build_model(spec, tokenizers.src.size, tokenizers.tgt.size))


def parameter_count(model: nn.Module) -> int:
    """Trainable parameters, tied ones counted once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def shape(spec: ModelConfig) -> str:
    """Describe the size of a model, and its positions unless they are the paper's."""
    if isinstance(spec, TranslationConfig):
        layers = f"{spec.encoder_layers} + {spec.decoder_layers}"
    else:
        layers = str(getattr(spec, "layers", ""))
    heads = positions = ""
    if isinstance(spec, AttentionModelConfig):
        heads = f", {spec.heads} heads" if spec.heads > 1 else ", 1 head"
        if spec.positions != "sinusoidal":
            positions = f", {'no' if spec.positions == 'none' else spec.positions} positions"
    return f"d_model {spec.d_model}, {layers} layers{heads}{positions}"


def unit(config: Config) -> str:
    """Return the unit of the text: pairs or lines."""
    return "pairs" if isinstance(config.model, TranslationConfig) else "lines"


def vocabulary(tokenizers: TokenizerPair) -> str:
    """Describe the size of the shared vocabulary, or of both."""
    src, tgt = f"{tokenizers.src.size:,}", f"{tokenizers.tgt.size:,}"
    return f"{tgt} tokens" if tokenizers.shared else f"{src} + {tgt} tokens"


class Run(core_run.Run):
    """A run folder of any kind of model, with the files that rings add to those of `core/run.py`.

    ```
    weights/start.safetensors   the weights of another run that the training began with
    tensorboard/                log.jsonl as TensorBoard events
    card.md                     scores.json for people
    bad-batch.json              the last update of a training that gave up
    alignment.json              the heads that align words best, once `qkv align` has measured them
    shortlist.safetensors       the target tokens that each source token can need, once they are learned
    ```
    """

    @cached_property
    def config(self) -> Config:
        return Config.load(self.path / "config.toml")

    @property
    def start(self) -> Path:
        """The weights that training begins with, if they are those of another run."""
        return self.path / "weights" / "start.safetensors"

    def build_model(self) -> Model:
        return build_model(self.config.model, self.tokenizers.src.size, self.tokenizers.tgt.size)

    def weights(self, name: str = "") -> Path:
        """Return the file of the named weights, which may also be the last ones or a step number."""
        if name == "last" and (kept := self.checkpoints()):
            name = kept[-1].stem
        return super().weights(f"step-{int(name):07d}" if name.isdigit() else name)

    @property
    def cutter(self) -> TextCutter:
        """What cuts texts into pieces like the lines of the training text; an older run folder has no record of them.

        Then texts are cut into sentences.
        """
        data, statistics = self.config.data, LineStatistics.read(self.about.get("lines"))
        return TextCutter(self.tokenizers.src.encode, data.max_length, data.src_lang, statistics)

    @property
    def store(self) -> Path:
        """Folder of the tokenised text: in the run folder, or outside it where several runs share it."""
        return self.path / (self.about.get("store", "store") if self.exists() else "store")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder, so that a second process that trains in it is refused.

        Some network file systems cannot lock: training goes on there, after a warning.
        """
        folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in LOCKED:
                os.close(folder)
                raise UsageError(f"{self.path}: another process is training here: wait for it, or stop it") from None
            warning = f"this file system cannot lock folders ({error.strerror}): start no second training here"
            print(f"{self.path}: {warning}", file=sys.stderr, flush=True)
        try:
            yield
        finally:
            os.close(folder)

    def in_training(self) -> bool:
        """Return whether a process is training in this folder now; False where the file system cannot lock."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in LOCKED
        finally:
            os.close(folder)
        return False

    def no_weights(self) -> str:
        if self.scores:  # they were there once
            return "no weights: restore them from a copy, or train again"
        options = self.config.train
        first = min(options.validate_every, options.steps)
        remedy = "wait for it" if self.in_training() else f"go on with `qkv train --resume --run {self.path}`"
        return f"no weights yet: the first come with the first validation, at step {first:,}: {remedy}"


def stored_at(run: Path, store: Path) -> str:
    """Return the entry `store` of run.json: a path inside the run folder, or an absolute one."""
    return "store" if store == run / "store" else str(store.resolve())


# ---- search ----------------------------------------------------------------------------------------------------------


def start_search_for(device: torch.device) -> StartSearch:
    """Return how searches are started on a device: with steps in C on a CPU, by kernels on a GPU."""
    if device.type == "cpu":
        from qkv.engines.cpu.native_search import start_native

        return start_native
    from qkv.engines.cuda_decoding.search_kernels import start_triton

    return start_triton


def search_engines_for(
    model: Any, tokenizers: TokenizerPair, device: torch.device, workers: ProcessWorkers[OpenedRun] | None = None
) -> list[DecodingEngine]:
    """Return the engines that decode with a model faster than `search_all`, for the options that they support."""
    engines: list[DecodingEngine] = []
    if device.type == "cuda":
        from qkv.engines.cuda_decoding.continuous_batching import SlotDecoding

        engines.append(SlotDecoding(model, tokenizers))
    if workers is not None:
        from qkv.engines.cpu.native_search import ProcessDecoding

        engines.append(ProcessDecoding(workers))
    return engines


def open_run(path: str, weights: str = "", dtype: str = "auto") -> OpenedRun:
    """Return a run's model, packed, and its tokenizers: what each process works with."""
    from qkv.engines.cpu import pack

    run = Run.open(path)
    model: Any = pack(run.model(torch.device("cpu"), weights), dtype)
    return model, run.tokenizers


# ---- training --------------------------------------------------------------------------------------------------------


def task_for(config: Config) -> Task:
    """Return the task of this kind of model: its training text, loss and validation."""
    match config.model:
        case DecoderOnlyConfig():
            from qkv.training.lm_tasks import LanguageModelTask

            return LanguageModelTask()
        case EncoderOnlyConfig():
            from qkv.training.lm_tasks import MaskedLanguageModelTask

            return MaskedLanguageModelTask()
        case _:
            start = start_search_for(choose_device(config.train.device))
            bleu = partial(bleu_of, config.data.tgt_lang)
            return TranslationTask(start, bleu, loss_in_parts, partial(PairUpdates, **batch_options_for(config)))


def bleu_of(language: str, hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Return the BLEU of a corpus with the tokenizer that sacreBLEU has for the target language."""
    from qkv.evaluation.metrics import bleu_tokenizer

    return corpus_bleu(hypotheses, references, bleu_tokenizer(language))


def batch_options_for(config: Config) -> dict[str, Any]:
    """Return the arguments of batches of pairs: BPE-dropout, maximum length, alignments."""
    align = config.train.guided_alignment > 0
    return {"dropout": config.tokenizer.dropout, "max_length": config.data.max_length, "align": align}


def train_step_for(config: Config, world: World = ALONE) -> type[PlainTrainStep]:
    """Return the fastest training step that supports the config on its device."""
    device = choose_device(config.train.device)
    if config.train.parallel == "sharded" and world.size > 1:
        return ShardedTrainStep
    if device.type == "cpu":  # PyTorch reports a lack of memory on accelerators only
        return PlainTrainStep
    if device.type == "cuda":
        from qkv.engines.cuda_training import cuda_trainer

        if cuda_trainer.supports(config, device, world) is None:
            return cuda_trainer.CudaTrainStep
    return MemoryLimitedStep


def updates_for(
    config: Config,
    text: PreparedText,
    device: torch.device | None = None,
    world: World = ALONE,
    step: type[PlainTrainStep] | None = None,
) -> UpdateStream:
    """Return the stream of updates that this training step reads, and of each update this rank's share."""
    device = device or torch.device("cpu")
    packed_updates = getattr(step or train_step_for(config, world), "packed_updates", None)  # of the CUDA engine
    updates: UpdateStream
    if packed_updates is not None:
        updates = packed_updates(config, text, device, world, **batch_options_for(config))
    else:
        updates = task_for(config).updates(text, config, device, world)
    updates.wrap = prefetch
    return updates


def prefetch(updates: Updates, depth: int = UPDATES_AHEAD) -> Updates:
    """Make the next updates in a thread while the model is trained on the current one; raise its exceptions here.

    The updates are the same: all randomness in a batch follows from its seed.
    """
    maker = ThreadPoolExecutor(1)
    try:
        waiting = deque(maker.submit(next, updates, None) for _ in range(depth))
        while (update := waiting.popleft().result()) is not None:
            waiting.append(maker.submit(next, updates, None))
            yield update
    finally:  # a thread inside torch while the interpreter ends would abort the process
        maker.shutdown(cancel_futures=True)


def objective_for(config: Config, model: Model, tokenizers: TokenizerPair) -> Objective:
    """Return the loss that the config names."""
    options, pad = config.train, tokenizers.tgt.pad
    if options.guided_alignment:
        from qkv.training.regularization import GuidedAlignment

        weight, smoothing = options.guided_alignment, options.label_smoothing
        return GuidedAlignment(model, weight=weight, smoothing=smoothing, pad=pad)
    if options.r_drop:
        from qkv.training.regularization import RDropObjective

        return RDropObjective(smoothing=options.label_smoothing, alpha=options.r_drop, pad=pad)
    return SmoothedObjective(options.label_smoothing, pad, loss_in_parts)


def optimizer_for(model: nn.Module, options: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer that the options name.

    All of them keep tensors in `state[parameter]`, take a learning rate that is a number or a tensor, and skip a step
    on the device where their attribute `found_inf` is 1.
    """
    settings: dict[str, Any] = {"betas": (options.beta1, options.beta2), "eps": options.eps}
    if options.optimizer == "adam":
        return build_optimizer(model, options)
    from qkv.training.matrix_optimizers import Muon, Soap, build_adamw

    match options.optimizer:
        case "muon":
            return Muon(model, weight_decay=options.weight_decay, **settings)
        case "soap":
            return Soap(model, weight_decay=options.weight_decay, **settings)
        case "adamw":
            return build_adamw(model, options)
    raise TypeError(f"no optimizer for train.optimizer = {options.optimizer!r}")


def trainer_for(
    config: Config, text: PreparedText, world: World = ALONE, step: type[PlainTrainStep] | None = None
) -> Trainer:
    """Return a trainer of a new model; `step` replaces the fastest training step."""
    options, tokenizers, device = config.train, text.tokenizers, choose_device(config.train.device)
    if world.size > 1:
        distributed.check_device(device)
    step = step or train_step_for(config, world)

    def build_on_device() -> Model:
        return build_model(config.model, tokenizers.src.size, tokenizers.tgt.size).to(device)

    torch.manual_seed(options.seed)
    model = build_on_device()
    if world.size > 1:
        distributed.copy_from_first(model.parameters())  # other processors may have drawn other bits
    if options.checkpointing:
        recompute_layers(model)
    if issubclass(step, ShardedTrainStep):
        distributed.shard(model, device, world)
    optimizer, objective = optimizer_for(model, options), objective_for(config, model, tokenizers)
    # A parameter's device has a number; the thread that reads batches has no current device of its own.
    updates = updates_for(config, text, next(model.parameters()).device, world, step)
    parts: dict[str, Any] = {"world": world}
    if options.ema:
        from qkv.training.regularization import Ema

        parts["hooks"] = (Ema(model, options.ema),)
    if issubclass(step, MemoryLimitedStep | ShardedTrainStep):
        parts["updates"] = updates
    if issubclass(step, ShardedTrainStep):
        parts["build"] = build_on_device
    train_step = step(model, optimizer, options, objective, **parts)
    schedule = ConfigSchedule(options, config.model.d_model, updates)
    return Trainer(config, text, train_step, task_for(config), updates, schedule)
