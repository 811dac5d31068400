"""Runs a user's module on a few ids and wraps it as a `seq2seq.Seq2Seq`; mismatches become one-line errors."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...base.errors import ConfigError, TformerError, unknown
from ...bundle.contract import GRAPHS, layer_names
from ..config import ModelConfig
from ..seq2seq import GrowingCache, Layers, Seq2Seq, first_past, log_probs
from .recompute import EncoderAlone, Hooked, Hooks, Recomputed, entering, plain_attention
from .user_model import UserModel

BATCH, SOURCE, TARGET, BEAMS = 3, 5, 4, 2
"""Sizes of the probe, all different so that swapped axes are found."""
MOST_POSITIONS, MOST_LOGITS = 2048, 1 << 26
"""Limits of the longest probe: attention grows with the square of the positions, and a prefix has logits at each."""
ANSI = re.compile(r"\x1b\[[0-9;]*m")
LIMIT = 5e-4
"""Largest difference of log-probabilities that must agree; fp32 rounding stays below it, a wrong mask does not."""
REPEATED = 1e-5
"""Largest difference of a score between two equal calls; smaller random differences are found by the trace."""
SUM = 1e-3
"""Largest difference of a sum of probabilities from 1, in any precision that a softmax may have had."""


def wrapped(user: UserModel, where: str) -> Seq2Seq:
    """A user's module as an exportable `Seq2Seq`. Raises ConfigError."""
    module = user.module.eval()
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(f"{where}: the module is of torch.jit, which torch.export does not take: leave torch.jit out")
    if wrong := [name for name, tensor in module.named_parameters() if tensor.dtype != torch.float32]:
        raise ConfigError(f"{where}: parameter {wrong[0]} is not float32: call .float() on the module")
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if sparse := [name for name, tensor in tensors.items() if tensor.layout != torch.strided]:
        kind = str(tensors[sparse[0]].layout).removeprefix("torch.")
        raise ConfigError(f"{where}: {sparse[0]} is {kind}, not dense: call .to_dense() on it")
    if user.follows_protocol([name for name in ("forward", "encode", "decode") if getattr(user, name)]):
        made_by_user = cast(Seq2Seq, module)
        if not isinstance(made_by_user.config, ModelConfig):
            kind = type(made_by_user.config).__name__
            raise ConfigError(f"{where}: config is a {kind}: must be a tformer_deploy.model.config.ModelConfig")
        biased = getattr(made_by_user.output, "bias", None) is not None
        if biased != made_by_user.config.output_bias:
            raise ConfigError(f"{where}: config.output_bias={not biased}: must be {biased}, as the module's output is")
        ids = _ids(made_by_user.config)
        with torch.no_grad():
            with NoAutocast(where):
                cast(Any, module).notes_attention = _require_protocol(made_by_user, where)
            with calling(where, "step"):
                _require_repeated(lambda: stepped(made_by_user, *ids), where)
        cast(Any, module).unread = unread(module, lambda: stepped(made_by_user, *ids))
        return made_by_user
    with torch.no_grad():
        if user.alone:
            return cast(Seq2Seq, _encoder_alone(user, where))
        plain = Recomputed(user, _memory_width(user, where))
        with NoAutocast(where):
            _logits(plain, user, where)
        _require_repeated(lambda: _decoded(plain, *_ids(user)), where)
        _require_masked(plain, where)
        made = plain
        if user.layers:
            made = Hooked(user, plain.memory_width, _hooks(plain, user, where))
            _require_equal(made, plain, where)
    made.unread = unread(plain, lambda: _decoded(plain, *_ids(user)))
    return cast(Seq2Seq, made)


def _encoder_alone(user: UserModel, where: str) -> EncoderAlone:
    """A module without a decoder. Raises ConfigError."""
    with NoAutocast(where):
        made = EncoderAlone(user, _memory_width(user, where))
    src_ids, lengths, _ = _ids(user)

    def values(rows: slice = slice(None), size: int | None = None) -> Tensor:
        """Memory, with zeros at padding."""
        memory = made.encode(src_ids[rows, :size], lengths[rows])
        return memory * (torch.arange(memory.shape[1]) < lengths[rows, None])[..., None]

    with calling(where, "encode"):
        together = values()
        if not together.isfinite().all():
            raise ConfigError(f"{where}: encode returned what is no number: look at its masks and weights")
        _require_repeated(values, where)
        for row, size in enumerate(lengths.tolist()):
            off = (values(slice(row, row + 1), size) - together[row, :size]).abs().max()
            _require_alike(float(off), "vectors", where)
    made.unread = unread(made, values)
    return made


@contextmanager
def calling(where: str, what: str) -> Iterator[None]:
    """Make a one-line ConfigError of what a user's code raises, with the line of their file.

    Of SystemExit too: the command would end as if it had done its work.
    """
    try:
        yield
    except (TformerError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        file = where.rpartition(":")[0]
        places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        places += [(error.filename or "", error.lineno)] if isinstance(error, SyntaxError) else []
        lines = [line for name, line in places if Path(name).resolve() == Path(file).resolve()]
        place = f"{file}, line {lines[-1]}" if lines else where
        cause: BaseException = error
        while type(cause).__module__.startswith("torch.") and cause.__cause__ is not None:
            cause = cause.__cause__  # the exporter's own errors are pages of advice to its developers, not to users
        said = " ".join(ANSI.sub("", str(cause)).split())[:300]
        if "data-dependent" in said:
            said = "a choice by values, such as `if mask.any():`, which no graph has"
        if "inferred a static shape" in said:
            said = "a size became a constant: no len(x), int(x.shape[0]) or loops over positions"
        if "index out of range in self" in said:  # what torch says of a table
            said += ": is src_vocab, tgt_vocab or max_positions larger than the module's table?"
        if isinstance(error, SystemExit):
            said = (
                f"{error.code or 0}, which ends Python: what only a script does belongs under if __name__ == '__main__'"
            )
        raise ConfigError(f"{place}: {what} raised {type(cause).__name__}: {said}") from error


class NoAutocast(TorchFunctionMode):  # type: ignore[no-untyped-call]
    """Raises ConfigError where a module computes in half precision by autocast."""

    def __init__(self, where: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where = where

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch calls in place of each function."""
        if torch.is_autocast_enabled("cpu"):
            kind = str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")
            raise ConfigError(f"{self.where}: the module computes in {kind}: leave autocast out of it")
        return func(*args, **(kwargs or {}))


def _ids(user: UserModel | ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """src_ids (B, S) with padding, src_lengths (B), tgt_ids (B, T), none of them special where there are others."""
    generator = torch.Generator().manual_seed(1)
    special = {user.pad_id, user.start_id, user.eos_id}
    tgt_vocab = user.tgt_vocab or user.src_vocab  # of an encoder alone

    def draw(vocab: int, *shape: int) -> Tensor:
        usual = torch.tensor([i for i in range(vocab) if i not in special] or [0])
        return usual[torch.randint(len(usual), shape, generator=generator)]

    lengths = torch.tensor([SOURCE, SOURCE - 2, 1]).clamp(max=user.max_positions)
    src_ids = draw(user.src_vocab, BATCH, int(lengths.max()))
    src_ids[torch.arange(src_ids.shape[1]) >= lengths[:, None]] = user.pad_id
    tgt_ids = draw(tgt_vocab, BATCH, min(TARGET, user.max_positions))
    tgt_ids[:, 0] = user.start_id
    return src_ids, lengths, tgt_ids


def _memory_width(user: UserModel, where: str) -> int:
    if user.encode is None:
        return 1
    src_ids, lengths, _ = _ids(user)
    with calling(where, "encode"), plain_attention():
        memory: Any = user.encode(user.module, src_ids, torch.arange(src_ids.shape[1]) < lengths[:, None])
    _require(memory, (*src_ids.shape, -1), "memory (B, S, d)", "encode", where)
    return int(memory.shape[2])


def _logits(plain: Recomputed, user: UserModel, where: str) -> None:
    """Raise ConfigError where the module returns no logits."""
    src_ids, lengths, tgt_ids = _ids(user)
    what = "forward" if user.forward else "decode"
    with calling(where, what):
        logits = _decoded(plain, src_ids, lengths, tgt_ids)
    _require(logits, (*tgt_ids.shape, user.tgt_vocab), "logits (B, T, V)", what, where)
    _require_logits(logits, what, where)


def _require_logits(logits: Tensor, what: str, where: str) -> None:
    """Raise ConfigError for what is no number, or is a probability already: log_softmax makes other scores of it."""
    if not logits.isfinite().all():
        raise ConfigError(f"{where}: {what} returned logits that are not numbers: look at its masks and weights")
    if (logits >= 0).all() and ((logits.sum(-1) - 1).abs() < SUM).all():
        raise ConfigError(
            f"{where}: {what} returned probabilities, which sum to 1, where logits are wanted: leave its softmax out, "
            "or make it log_softmax"
        )


def _require_protocol(model: Seq2Seq, where: str) -> bool:
    """Whether a step notes `attention`, which only recipes with attention need.

    Raises ConfigError where a module's functions give others than `Seq2Seq` says, by the field or name.
    """
    config, side = model.config, model.config.decoder
    src_ids, lengths, tgt_ids = _ids(config)
    rows, empty = (len(src_ids), BEAMS), torch.zeros(len(src_ids) * BEAMS, side.heads, 0, side.head_dim)
    noted: list[Layers] = [{}, {}]
    with calling(where, "encode"):
        memory = model.encode(src_ids, lengths, noted[0])
    _require(memory, (*src_ids.shape, -1), "memory (B, S, d)", "encode", where)
    with calling(where, "cross_keys_values"):
        cross = model.cross_keys_values(memory)
    _require_layers(len(cross), config, "cross_keys_values", "returned", where)
    shape = (len(src_ids), side.heads, src_ids.shape[1], side.head_dim)
    for each in (tensor for pair in cross for tensor in pair):
        _require(
            each, shape, "keys and values (B, H, S, D) by the config's heads and head_dim", "cross_keys_values", where
        )
    cache = GrowingCache([(empty, empty)] * side.layers)
    with calling(where, "step"):
        hidden = model.step(tgt_ids[:, :1].expand(rows).int(), torch.tensor([0]), lengths, cross, cache, noted[1])
    _require(hidden, (*rows, -1), "hidden states (B, K, d)", "step", where)
    _require_layers(len(cache.present), config, "step", "extended the cache of", where)
    with calling(where, "output of what step returned"):
        logits = model.output(hidden)
    _require(logits, (*rows, config.tgt_vocab), "logits (B, K, V) by config.tgt_vocab", "output", where)
    _require_logits(logits, "output", where)
    for graph, function, layers in zip(GRAPHS, ("encode", "step"), noted, strict=True):
        names = layer_names(graph, config)
        if missing := [name for name in names if name not in layers]:
            raise ConfigError(
                f"{where}: {function} noted no {missing[0]} in layers: by config it must note {', '.join(names)}"
            )
    return "attention" in noted[1]


def _require_layers(found: int, config: ModelConfig, function: str, did: str, where: str) -> None:
    if found != config.decoder_layers:
        raise ConfigError(
            f"{where}: {function} {did} {found} layers, where config.decoder_layers={config.decoder_layers}"
        )


def require_positions(model: Seq2Seq, where: str) -> None:
    """Raise ConfigError for a module that has no room for its last ids, or a source and a target of max_positions."""
    config, side = model.config, model.config.decoder
    size = min(config.max_positions, MOST_POSITIONS, max(1, MOST_LOGITS // config.tgt_vocab))
    src_ids = _ids(config)[0][:1, torch.arange(size) % SOURCE]
    src_ids[0, -1] = config.src_vocab - 1
    past, tokens = torch.zeros(1, side.heads, size - 1, side.head_dim), torch.full((1, 1), config.tgt_vocab - 1)
    what = f"a source and a target of {size} tokens, with max_positions={config.max_positions},"
    with torch.no_grad(), calling(where, what):
        memory = model.encode(src_ids.int(), torch.tensor([size]))
        if not config.decoder_layers:
            return
        cross = model.cross_keys_values(memory)
        cache = GrowingCache([(past, past)] * side.layers)
        model.step(tokens.int(), torch.tensor([size - 1]), torch.tensor([size]), cross, cache)


def _require(found: Any, shape: tuple[int, ...], what: str, function: str, where: str) -> None:
    """Raise ConfigError for what is no float tensor of a shape; -1 stands for any size."""
    if not isinstance(found, Tensor):
        raise ConfigError(f"{where}: {function} returned a {type(found).__name__}, not a tensor of {what}")
    fits = found.dim() == len(shape) and all(b in (-1, a) for a, b in zip(found.shape, shape, strict=True))
    if not fits or not found.is_floating_point():
        wanted = tuple("d" if size == -1 else size for size in shape)
        raise ConfigError(
            f"{where}: {function} returned {str(found.dtype)[6:]} {tuple(found.shape)}, where {what} is "
            f"({', '.join(map(str, wanted))})"
        )


def _decoded(model: Recomputed, src_ids: Tensor, lengths: Tensor, tgt_ids: Tensor) -> Tensor:
    """Logits (B, T, V) of a whole target at once."""
    memory = model.encode(src_ids, lengths)
    mask = torch.arange(src_ids.shape[1]) < lengths[:, None]
    with plain_attention():
        return model.decode(memory, mask, tgt_ids, GrowingCache([]))


def _require_masked(plain: Recomputed, where: str) -> None:
    """Raise ConfigError where a sentence's logits depend on its padding."""
    src_ids, lengths, tgt_ids = _ids(plain.user)
    together = _decoded(plain, src_ids, lengths, tgt_ids).log_softmax(-1)
    for row, size in enumerate(lengths.tolist()):
        one = slice(row, row + 1)
        alone = _decoded(plain, src_ids[one, :size], lengths[one], tgt_ids[one]).log_softmax(-1)
        _require_alike(float((alone - together[one]).abs().max()), "log-probabilities", where)


def looks_ahead(plain: Recomputed) -> bool:
    """Whether the score of a token changes with a later one."""
    src_ids, lengths, tgt_ids = _ids(plain.user)
    others = tgt_ids.clone()
    others[:, -1] = (tgt_ids[:, -1] + 1) % plain.user.tgt_vocab
    with torch.no_grad():
        found = [_decoded(plain, src_ids, lengths, ids)[:, :-1].log_softmax(-1) for ids in (tgt_ids, others)]
    return bool(((found[0] - found[1]).abs() > REPEATED).any())


def _require_alike(off: float, what: str, where: str) -> None:
    if not off <= LIMIT:
        raise ConfigError(
            f"{where}: a sentence's {what} change by {off:.2g} where longer ones stand beside it: "
            "mask its padding with src_mask, in the encoder and in cross-attention"
        )


def _require_repeated(scores: Callable[[], Tensor], where: str) -> None:
    """Raise ConfigError where the same ids have other scores the second time."""
    first, second = scores(), scores()
    off = float((first - second).abs().nan_to_num(0.0).max())
    if off > REPEATED:
        raise ConfigError(
            f"{where}: the same ids have other scores the second time, by {off:.2g}: it must not draw random numbers "
            "in eval, as F.dropout does without training=self.training, nor keep anything from call to call"
        )


def unread(module: nn.Module, scores: Callable[[], Tensor]) -> frozenset[str]:
    """Names of tensors that `scores` do not depend on: no graph needs them."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    tensors = {name: tensor for name, tensor in named if tensor.is_floating_point()}
    frozen = [tensor for tensor in tensors.values() if not tensor.requires_grad]
    try:
        for tensor in frozen:
            tensor.requires_grad_(True)
        with torch.enable_grad():
            gradients = torch.autograd.grad(scores().sum(), list(tensors.values()), allow_unused=True)
    except RuntimeError:  # not every function has a gradient
        return frozenset()
    finally:
        for tensor in frozen:
            tensor.requires_grad_(False)
    return frozenset(name for name, gradient in zip(tensors, gradients, strict=True) if gradient is None)


def _hooks(plain: Recomputed, user: UserModel, where: str) -> Hooks:
    """Where the module is taken apart. Raises ConfigError for names that it does not have."""
    module, hooks = user.module, Hooks(user.layers, user.self_attention)
    lists = {name for name, each in module.named_modules() if isinstance(each, nn.ModuleList | nn.Sequential)}
    if user.layers not in lists:
        raise unknown("list of layers", user.layers, lists)
    layers = module.get_submodule(user.layers)
    if not list(layers.children()):
        raise ConfigError(f"{where}: layers={user.layers!r} has no layers in it: name the list of the decoder's layers")
    for i, layer in enumerate(layers.children()):
        _submodule(layer, user.self_attention, f"module of {user.layers}.{i}")
    shapes: list[tuple[int, ...]] = []

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shapes.append(tuple(entering(args, kwargs).shape))

    watched = [hooks.first_layer(module), *hooks.attentions(module)]
    handles = [each.register_forward_pre_hook(look, with_kwargs=True) for each in watched]
    try:
        src_ids, lengths, tgt_ids = _ids(user)
        with calling(where, "decode"):
            _decoded(plain, src_ids, lengths, tgt_ids)
    finally:
        for handle in handles:
            handle.remove()
    batch, size = tgt_ids.shape
    if len(shapes) < 2 or shapes[0][:2] not in ((batch, size), (size, batch)):
        raise ConfigError(
            f"{where}: the layers of {user.layers} are not called with hidden states (B, T, d): "
            "leave out layers and self_attention"
        )
    axis = 1 if shapes[0][:2] == (batch, size) else 0
    return Hooks(user.layers, user.self_attention, axis, shapes[0][2], len(shapes) - 1)


def _submodule(module: nn.Module, name: str, kind: str) -> nn.Module:
    """A module by its name. Raises ConfigError with the nearest names."""
    modules: dict[str, nn.Module] = dict(module.named_modules())
    if name not in modules:
        depth = name.count(".")  # all names would be a page
        raise unknown(kind, name, [each for each in modules if each and each.count(".") <= depth])
    return modules[name]


def _require_equal(hooked: Hooked, plain: Recomputed, where: str) -> None:
    """Raise ConfigError where steps with caches give other scores than the module over the whole prefix."""
    src_ids, lengths, tgt_ids = _ids(plain.user)
    expected = _decoded(plain, src_ids, lengths, tgt_ids).log_softmax(-1)
    with calling(where, f"decode, with hooks on {hooked.hooks.layers} and {hooked.hooks.self_attention},"):
        found = stepped(cast(Seq2Seq, hooked), src_ids, lengths, tgt_ids)
    if found.shape == expected.shape and float((found - expected).abs().max()) <= LIMIT:
        return
    apart = f"differ by {float((found - expected).abs().max()):.2g}" if found.shape == expected.shape else "are others"
    raise ConfigError(
        f"{where}: with caches of what enters {hooked.hooks.self_attention}, log-probabilities {apart}: the decoder "
        "must not look ahead, and only its self-attention may read earlier tokens; leave out layers and self_attention"
    )


def stepped(model: Seq2Seq, src_ids: Tensor, lengths: Tensor, tgt_ids: Tensor) -> Tensor:
    """Log-probabilities (B, T, V) of a target that is fed token by token, in the last of several equal rows."""
    cross = model.cross_keys_values(model.encode(src_ids, lengths))
    past, found = first_past(model.config, cross[0][0], len(src_ids) * BEAMS), []
    for position, token in enumerate(tgt_ids.T):
        cache = GrowingCache(past)
        tokens = token[:, None].expand(-1, BEAMS).int()
        hidden = model.step(tokens, torch.tensor([position]), lengths, cross, cache)
        found.append(log_probs(model, hidden)[:, -1])
        past = cache.present
    return torch.stack(found, 1)
