"""What `prune` can be told: which units go, how many, and what says which."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings, StoredDtype

# Importance that looks at the loss on rows.
LOOK = ("taylor", "fisher")
# Importance that looks at rows, with labels or without.
ROWS = (*LOOK, "activation")
# What says how many units stay where there is no budget.
_INSTEAD = ("keep", "keep_heads", "keep_ffn", "scope")
MEASURES = ("parameters", "operations", "latency")


class Budget(Settings):
    """One budget over the whole model: the fraction of what it costs now that may be left of it."""

    parameters: float | None = Field(default=None, gt=0, lt=1, description="of all values that are stored")
    operations: float | None = Field(
        default=None, gt=0, lt=1, description="of the multiplications of one pass over a text"
    )
    latency: float | None = Field(
        default=None, gt=0, lt=1, description="of the time of a text, by timings of parts on this machine"
    )
    length: int | None = Field(
        default=None,
        ge=1,
        description="tokens of a text, for operations and latency; the mean of the data's, or 128 where"
        " it has no texts",
    )
    on: Literal["ort-cpu", "ort-cpu-int8", "torch"] | None = Field(
        default=None, description="where latency is measured; ort-cpu unless given"
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in MEASURES if getattr(self, name) is not None]
        if len(given) != 1:
            read = " and ".join(given) or "none"
            raise SettingError(
                f"give one of {', '.join(MEASURES)}, read {read}",
                code="settings-conflict" if given else "missing-setting",
            )
        if self.length is not None and given == ["parameters"]:
            raise SettingError(
                "length means nothing to a budget of parameters; remove it", code="unused-setting"
            )
        if self.on is not None and given != ["latency"]:
            raise SettingError("on is for a budget of latency; remove it", code="unused-setting")
        return self

    @property
    def measure(self) -> str:
        """In what it is given."""
        return next(name for name in MEASURES if getattr(self, name) is not None)

    @property
    def share(self) -> float:
        """The fraction that may be left."""
        return float(getattr(self, self.measure))


class PruneSettings(Settings):
    """Settings of `prune`. At least one head and one multiple of neurons stay in each layer.

    The number that stays is the nearest whole one; a half counts up.
    """

    what: list[Literal["heads", "ffn", "width", "channels"]] = Field(
        default=["ffn"],
        min_length=1,
        description="attention heads, feed-forward neurons (both, unless given, with a budget or keep_heads);"
        " or width alone, channels of the hidden states; or channels alone, those between convolutions",
    )
    keep: float = Field(default=0.75, gt=0, le=1, description="fraction of units that stays")
    keep_heads: float | None = Field(default=None, gt=0, le=1, description="instead of keep, for heads")
    keep_ffn: float | None = Field(default=None, gt=0, le=1, description="instead of keep, for neurons")
    budget: Budget | None = Field(
        default=None,
        description="instead of keep, one for the whole model: {parameters: 0.6}, {operations: 0.6} or"
        " {latency: 0.6}; all units compete, by their importance for what they cost",
    )
    scope: Literal["layer", "global"] = Field(
        default="layer",
        description="layer: the same fraction stays in each; global: units of all layers compete, heads with"
        " heads and neurons with neurons",
    )
    importance: Literal["taylor", "fisher", "magnitude", "random", "activation"] = Field(
        default="taylor",
        description="taylor and fisher look at the loss on rows (slope; mean squared slope), magnitude at the"
        " weights alone; random: drawn by the seed, a control. With a budget fisher, unless given. Of width"
        " activation, unless given: how large norms make a channel. Of channels not activation",
    )
    rows: int = Field(
        default=256,
        ge=1,
        description="rows that taylor, fisher, activation and compensate look at (calibration, else train)",
    )
    batch_size: int = Field(default=16, ge=1, description="rows per batch that taylor looks at")
    compensate: bool = Field(
        default=True,
        description="refit what reads the units that stay, by least squares on rows; needs rows; not of"
        " channels",
    )
    round_to: int = Field(default=8, ge=1, description="neurons or channels that stay are a multiple of this")
    dtype: StoredDtype = "keep"

    @model_serializer(mode="wrap")
    def _said(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without a budget as before there were any: keys of stored artifacts are made of it."""
        found: dict[str, Any] = written(self)
        unsaid = ("budget",) if self.budget is None else _INSTEAD
        return {name: value for name, value in found.items() if name not in unsaid}

    @model_validator(mode="before")
    @classmethod
    def _by_what(cls, given: Any) -> Any:
        """Take fisher for a budget, which compares heads with neurons, and activation for the width."""
        if not isinstance(given, dict):
            return given
        if "what" not in given and any(given.get(word) is not None for word in ("budget", "keep_heads")):
            given = given | {"what": ["heads", "ffn"]}
        if "importance" in given:
            return given
        if given.get("budget") is not None:
            return given | {"importance": "fisher"}
        return given | {"importance": "activation"} if given.get("what") == ["width"] else given

    @model_validator(mode="after")
    def _width_alone(self) -> Self:
        if "width" not in self.what:
            if self.importance == "activation":
                raise SettingError(
                    "importance: activation is of the width; take taylor, fisher, magnitude or random",
                    code="wrong-importance",
                )
            return self
        if len(set(self.what)) > 1:
            raise SettingError(
                "the width is pruned in a step of its own, before or behind heads and ffn",
                code="settings-conflict",
            )
        if self.budget is not None or self.scope == "global":
            word = "a budget" if self.budget is not None else "scope: global"
            raise SettingError(
                f"{word} chooses among heads and neurons; of the width say keep", code="unused-setting"
            )
        return self

    @model_validator(mode="after")
    def _channels_alone(self) -> Self:
        if "channels" not in self.what:
            return self
        if len(set(self.what)) > 1:
            raise SettingError(
                "channels of convolutions are pruned in a step of their own", code="settings-conflict"
            )
        if self.budget is not None:
            raise SettingError(
                "a budget chooses among heads and neurons; of channels say keep and scope",
                code="unused-setting",
            )
        if self.compensate and "compensate" in self.model_fields_set:
            raise SettingError(
                "compensate refits linear layers, and channels are of convolutions; remove it",
                code="unused-setting",
            )
        return self

    @model_validator(mode="after")
    def _of_what_goes(self) -> Self:
        for kind in ("heads", "ffn"):
            if kind not in self.what and getattr(self, f"keep_{kind}") is not None:
                raise SettingError(
                    f"keep_{kind} means nothing where what does not name {kind}; it is"
                    f" [{', '.join(self.what)}]. Write what: [heads, ffn], or leave keep_{kind} out",
                    code="unused-setting",
                )
        return self

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.budget is None:
            return self
        both = sorted(self.model_fields_set.intersection(_INSTEAD))
        if both:
            raise SettingError(
                f"a budget says how many units stay; remove {' and '.join(both)}", code="settings-conflict"
            )
        if self.importance == "magnitude" and len(set(self.what)) > 1:
            raise SettingError(
                "weights alone do not say what a head is worth beside a neuron, which a budget asks; take"
                " importance: taylor or fisher, or one kind in what",
                code="wrong-importance",
            )
        return self
