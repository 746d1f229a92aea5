"""What goes on the wire and how it is summed: frozen settings and the strings that name them."""

from __future__ import annotations

import difflib
import math
import os
import re
from dataclasses import Field, dataclass, field, fields
from fractions import Fraction
from typing import Any, ClassVar

import torch

from .environment.variables import check_environment
from .errors import SettingError, brief
from .kernels.slots import FP8_FORMAT, FP16_BLOCK, INT4_FORMAT, INT8_FORMAT, BlockFormat

ENVIRONMENT_VARIABLE = "FASTREDUCE_COMPRESSION"
RESIDUAL_DTYPES: dict[bool | str, torch.dtype] = {"8bit": torch.uint8, "bf16": torch.bfloat16}

_DECIMAL = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Compression:
    """A setting; `str()` gives the spec string, `Compression.parse` reads it back.

    The first `warm_up` steps under it, counted from where it is set, are those of `none`. On several
    hosts of several ranks `flat` lets all reduce as equals; else those of one host sum among themselves first.
    """

    name: ClassVar[str]
    warm_up: int = field(default=0, kw_only=True)
    flat: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not _is_whole(self.warm_up, 0):
            raise SettingError(f"warm_up={brief(self.warm_up)} in {self.name!r}; allowed: whole numbers of steps")
        if not isinstance(self.flat, bool):
            raise SettingError(f"flat={brief(self.flat)} in {self.name!r}; allowed: True, False")

    @property
    def two_shot(self) -> bool:
        """Whether shards are summed by our own kernel in FP32 (else by the transport, on the wire)."""
        return True

    @property
    def block(self) -> int:
        """Elements that share a scale; 0 where the wire is not quantized."""
        return 0

    @property
    def format(self) -> BlockFormat:
        """How a quantized wire holds elements and scales; INT8's where there is none."""
        return INT8_FORMAT

    @property
    def error_feedback(self) -> bool | str:
        """Whether what compression lost is added back in the next step; `8bit` or `bf16` says how that is kept."""
        return False

    @property
    def residual_dtype(self) -> torch.dtype:
        """What is lost is kept in this dtype: FP32, BF16, or uint8 for 8 bits."""
        return RESIDUAL_DTYPES.get(self.error_feedback, torch.float32)

    @property
    def random_seed(self) -> int | None:
        """The seed of stochastic rounding; None under rounding to nearest."""
        return None

    @property
    def alignment(self) -> int:
        """Elements to whose multiples slots and shards are aligned: a block, or what Triton sees as divisible."""
        return self.block or 16

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the wire that carries gradients of `dtype`."""
        raise NotImplementedError

    def __str__(self) -> str:
        options = [
            f.name if value is True else f"{f.name}={value}"
            for f in _options(self)
            if (value := getattr(self, f.name)) != f.default
        ]
        return self.name + (":" + ",".join(options) if options else "")

    @staticmethod
    def parse(spec: str) -> Compression:
        """Read a spec string such as `fp16:accumulate=wire` or `int8:block=128,error_feedback`.

        Raises:
            SettingError: naming the piece that is wrong and what is allowed.
        """
        name, colon, rest = spec.strip().partition(":")
        kind = KINDS.get(name)
        if kind is None:
            where = "" if name == spec else f" in {brief(spec)}"
            raise SettingError(f"unknown compression {brief(name)}{where}{_meant(name)}; allowed: {', '.join(KINDS)}")
        if ":" in rest:
            instead = brief(f"{name}:{rest.replace(':', ',')}")
            raise SettingError(f"two colons in {brief(spec)}: commas stand between options, {instead}")
        known = {f.name: f for f in _options(kind)}
        options: dict[str, Any] = {}
        for piece in rest.split(",") if colon else ():
            key, equals, value = piece.strip().partition("=")
            if key not in known:
                raise SettingError(
                    f"unknown option {brief(piece.strip())} in {brief(spec)}; {name} takes: {', '.join(known)}"
                )
            if key in options:
                raise SettingError(f"option {key!r} is given twice in {brief(spec)}")
            options[key] = _read_option(spec, piece.strip(), known[key], value if equals else None)
        return kind(**options)

    @staticmethod
    def resolve(setting: Compression | str | None) -> Compression:
        """The setting itself, a parsed spec, or for None what FASTREDUCE_COMPRESSION says (default `none`).

        Whatever is given, our environment variables are looked at: this is where wrappers begin.

        Raises:
            SettingError: if it is no setting, or a variable holds what it may not.
        """
        check_environment()
        if isinstance(setting, Compression):
            return setting
        if setting is None:
            try:
                return Compression.parse(os.environ.get(ENVIRONMENT_VARIABLE) or "none")
            except SettingError as error:
                raise SettingError(f"{ENVIRONMENT_VARIABLE}: {error}") from None
        if not isinstance(setting, str):
            raise SettingError(
                f"compression must be a spec string or a Compression, got {type(setting).__name__}: {setting!r}"
            )
        return Compression.parse(setting)


def _meant(name: str) -> str:
    """What may have been meant by the name of no setting, or ""."""
    first, comma, rest = (part.strip() for part in name.partition(","))
    if comma and first in KINDS:
        if rest.partition(",")[0].strip() in KINDS:
            return ", a list of settings where one is asked for"
        return f": options stand behind a colon, {brief(f'{first}:{rest}')}"
    close = difflib.get_close_matches(name.lower(), KINDS, 1, cutoff=0.8)
    return f", did you mean {close[0]!r}?" if close else ""


def _options(kind: type[Compression] | Compression) -> list[Field[Any]]:
    """Those of several settings come last, and of all settings at the very end."""
    of_all = {option.name for option in fields(Compression)}
    return sorted(fields(kind), key=lambda option: (bool(option.kw_only), option.name in of_all))


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _read_option(spec: str, piece: str, option: Field[Any], value: str | None) -> object:
    default, words = option.default, option.metadata.get("or", ())
    if isinstance(default, bool):
        if value is None or value.lower() in ("true", "1"):
            return True
        if value.lower() in ("false", "0"):
            return False
        if value in words:
            return value
        others = "".join(f"={word}, " for word in words)
        raise SettingError(
            f"{brief(piece)} in {brief(spec)} is not a switch; write it alone, or {others}=true or =false"
        )
    if value is None:
        raise SettingError(f"option {piece!r} in {brief(spec)} needs a value: {piece}=…")
    if isinstance(default, int):
        if not (value.isascii() and value.isdecimal()):
            raise SettingError(f"{brief(piece)} in {brief(spec)} needs a whole number")
        try:
            return int(value)
        except ValueError as error:  # Python reads no more than 4300 digits
            raise SettingError(f"{brief(piece)} in {brief(spec)}: a number of {len(value)} digits") from error
    if isinstance(default, float):
        if not _DECIMAL.fullmatch(value):
            raise SettingError(f"{brief(piece)} in {brief(spec)} needs a number")
        return float(value)
    return value


@dataclass(frozen=True)
class _Plain(Compression):
    """A wire in a floating-point dtype, which either we or the transport can sum."""

    accumulate: str = "fp32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accumulate not in ("fp32", "wire"):
            raise SettingError(f"accumulate={brief(self.accumulate)} in {self.name!r}; allowed: fp32, wire")

    @property
    def two_shot(self) -> bool:
        """Whether shards are summed by our own kernel in FP32."""
        return self.accumulate == "fp32"


@dataclass(frozen=True)
class _Rounded(Compression):
    """A wire that numbers are rounded to, to nearest or by chance."""

    rounding: str = field(default="nearest", kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding not in ("nearest", "stochastic"):
            raise SettingError(f"rounding={brief(self.rounding)} in {self.name!r}; allowed: nearest, stochastic")
        if not (_is_whole(self.seed, 0) and self.seed < 2**32):
            raise SettingError(f"seed={brief(self.seed)} in {self.name!r}; allowed: whole numbers below 2^32")
        if self.seed and self.rounding == "nearest":
            raise SettingError(f"seed={self.seed} in {self.name!r} says nothing without rounding=stochastic")
        if self.rounding == "stochastic" and self.error_feedback:
            raise SettingError(
                f"rounding=stochastic and error_feedback in {self.name!r}: what rounding to nearest loses comes back "
                "with the next step, and chance would only make it more; take one of them"
            )
        if self.rounding == "stochastic" and not self.two_shot:
            raise SettingError(
                f"rounding=stochastic and accumulate=wire in {self.name!r}: the transport rounds its sums to nearest; "
                "allowed: accumulate=fp32"
            )

    @property
    def random_seed(self) -> int | None:
        """The seed of stochastic rounding; None under rounding to nearest."""
        return self.seed if self.rounding == "stochastic" else None


@dataclass(frozen=True)
class NoCompression(_Plain):
    """Gradients travel in their own dtype, summed by the transport or (`accumulate="fp32"`) by two-shot."""

    name: ClassVar[str] = "none"
    accumulate: str = "wire"

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The gradients' own dtype."""
        return dtype


@dataclass(frozen=True)
class FP16(_Plain):
    """Gradients travel as FP16 with block exponents, summed in FP32 by two-shot or by the transport.

    Each block of 128 elements travels with a power of two, which keeps it within FP16's range wherever it lies in
    FP32's: from 2^-14 to 65504 that is 1, so that ordinary gradients travel as plain FP16. With `accumulate="wire"`
    ranks agree on it first, and leave room for the sum: it does not overflow either, on up to 8,192 ranks.
    Gradients that are FP16 themselves travel as they are.
    """

    name: ClassVar[str] = "fp16"

    @property
    def alignment(self) -> int:
        """A block: none holds elements of two slots."""
        return FP16_BLOCK

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Bytes: FP16 and exponents (kernels/README.md); or FP16, the gradients' own."""
        return torch.float16 if dtype is torch.float16 else torch.uint8


@dataclass(frozen=True)
class BF16(_Plain, _Rounded):
    """Gradients travel as BF16, summed in FP32 by two-shot or (`accumulate="wire"`) by the transport.

    `rounding` and `seed` are as for INT8, but not with `accumulate="wire"`.
    """

    name: ClassVar[str] = "bf16"

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """BF16."""
        return torch.bfloat16


@dataclass(frozen=True)
class _Quantized(_Rounded):
    """Gradients travel with a scale per `block` elements, summed in FP32 by two-shot."""

    format: ClassVar[BlockFormat]
    least_block: ClassVar[int] = 16
    block: int = 128
    error_feedback: bool | str = field(default=False, metadata={"or": tuple(RESIDUAL_DTYPES)})

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.least_block
        if not isinstance(self.error_feedback, bool) and self.error_feedback not in tuple(RESIDUAL_DTYPES):
            raise SettingError(
                f"error_feedback={brief(self.error_feedback)} in {self.name!r}; allowed: True, False, "
                + ", ".join(map(repr, RESIDUAL_DTYPES))
            )
        if not (_is_whole(self.block, least) and self.block <= 4096 and self.block % least == 0):
            raise SettingError(
                f"block={brief(self.block)} in {self.name!r}; allowed: multiples of {least} from {least} to 4096"
            )

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Bytes: payload and scales (kernels/README.md)."""
        return torch.uint8


@dataclass(frozen=True)
class INT8(_Quantized):
    """Gradients travel as INT8, a scale per `block` elements, summed in FP32 by two-shot.

    `block` is a multiple of 16 from 16 to 4096. With `error_feedback` each rank adds what
    quantization lost to its next gradient (Seide et al. 2014; Karimireddy et al. 2019), and so
    does the rank that quantizes a reduced shard (Tang et al. 2019, DoubleSqueeze). `error_feedback="8bit"` keeps what
    was lost in 8 bits and a power of two per block, a quarter of the memory, and `"bf16"` in BF16, half of it. With
    `rounding="stochastic"` and without feedback, a number between two steps becomes the upper one with the chance that
    makes its mean exact; the bits follow from `seed`, the step, the rank, the parameter's name and the element in it.
    """

    name: ClassVar[str] = "int8"
    format: ClassVar[BlockFormat] = INT8_FORMAT


@dataclass(frozen=True)
class FP8(_Quantized):
    """Gradients travel as FP8 (E4M3), an FP32 scale per `block` elements, summed in FP32 by two-shot.

    `block`, `error_feedback`, `rounding` and `seed` are as for INT8. An element is rounded to 4 digits of its own size,
    down to 2^-15 of its block's largest: more than INT8 loses of the large ones, and less of the small ones.
    """

    name: ClassVar[str] = "fp8"
    format: ClassVar[BlockFormat] = FP8_FORMAT


@dataclass(frozen=True)
class INT4(_Quantized):
    """Gradients travel as INT4, a BF16 scale per `block` elements: 4.5 bits an element; summed in FP32 by two-shot.

    `block` is a multiple of 32 from 32 to 4096. `error_feedback`, `rounding` and `seed` are as for INT8. The scale has
    a sign, so that a block's largest magnitude always has the one code without a counterpart, -8; under stochastic
    rounding codes go from -7 to 7.
    """

    name: ClassVar[str] = "int4"
    format: ClassVar[BlockFormat] = INT4_FORMAT
    least_block: ClassVar[int] = 32
    block: int = 32


@dataclass(frozen=True)
class OfWholeParameters(Compression):
    """What is made of a whole gradient, not element by element or block by block; a part of one would give another.

    Ranks exchange it in FP32. Error feedback is part of the method.
    """

    @property
    def two_shot(self) -> bool:
        """The wire holds no shards."""
        return False

    @property
    def error_feedback(self) -> bool:
        """It is part of the method."""
        return True

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """FP32; under top-k some of it is the bits of places."""
        return torch.float32


@dataclass(frozen=True)
class PowerSGD(OfWholeParameters):
    """In the place of a matrix travel two thin factors of it, summed by the transport in FP32 (Vogels et al. 2019).

    A gradient is a matrix of as many rows as its parameter has along its first dimension, or, of one that lies
    transposed, along the one that is outermost in memory. It travels as factors of `rank` columns where that makes it
    smaller by more than `min_compression_rate`, as in torch's hook:
    (rows + columns) · rank · min_compression_rate < rows · columns. Other gradients, such as biases, travel in FP32 in
    the same wire, and lose nothing. What the factors do not hold of a gradient is kept and added to the next one: error
    feedback is part of the method.
    """

    name: ClassVar[str] = "powersgd"
    rank: int = 4
    min_compression_rate: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, value in (("rank", self.rank), ("min_compression_rate", self.min_compression_rate)):
            if not _is_whole(value, 1):
                raise SettingError(f"{option}={brief(value)} in {self.name!r}; allowed: whole numbers from 1 on")

    def compresses(self, rows: int, columns: int) -> bool:
        """Whether a matrix travels as factors."""
        return (rows + columns) * self.rank * self.min_compression_rate < rows * columns


@dataclass(frozen=True)
class TopK(OfWholeParameters):
    """Of a gradient travel the `ratio` of its elements that are largest in magnitude, with their places, in FP32.

    That is, of each parameter by itself, ⌈ratio · elements⌉ of them (Aji and Heafield 2017; Lin et al. 2018, Deep
    Gradient Compression), of equal ones those in front. Ranks choose their own, each gets all, and sums them in rank
    order. What is not sent is kept and added to the next gradient: error feedback is part of the method. Parameters of
    fewer than `min_numel` elements travel whole, in FP32 in the same message, and lose nothing.
    """

    name: ClassVar[str] = "topk"
    ratio: float = 0.01
    min_numel: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.ratio, (int, float)) or not 0 < self.ratio < 0.5:
            raise SettingError(
                f"ratio={brief(self.ratio)} in {self.name!r}; allowed: numbers above 0 and below 0.5, from which on a "
                "gradient is smaller without places"
            )
        if not _is_whole(self.min_numel, 1):
            raise SettingError(f"min_numel={brief(self.min_numel)} in {self.name!r}; allowed: whole numbers from 1 on")

    def count(self, numel: int) -> int:
        """How many elements of a gradient travel; 0 where it travels whole."""
        count = math.ceil(Fraction(str(float(self.ratio))) * numel)  # of what was written: 7 are 0.07 of 100
        return count if numel >= self.min_numel and 2 * count < numel else 0


KINDS: dict[str, type[Compression]] = {
    kind.name: kind for kind in (NoCompression, FP16, BF16, INT8, FP8, INT4, PowerSGD, TopK)
}
