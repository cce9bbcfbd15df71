"""Properties of a model that change how an engine serves it. Imports no torch."""

from dataclasses import dataclass

from conf.errors import UserError


@dataclass(frozen=True)
class ModelCapabilities:
    """The defaults describe a causal decoder with full attention, whose keys depend only on earlier tokens."""

    needs_whole_prompt: bool = False
    """Whether prompt tokens attend to later tokens. A prompt then runs in one step."""
    keys_depend_on_length: bool = False
    """Whether keys depend on the sequence length."""
    long_rope_threshold: int | None = None
    """The sequence length above which all keys change. A sequence that grows past it is computed again.

    None: keys do not change.
    """
    has_windows: bool = False
    """Whether any layer uses sliding-window attention."""
    prefix_stops_scaling: bool = False
    """Whether keys stop depending on the prompt length after a soft prefix of keys and values."""
    predicts_ahead: bool = False
    """Whether the model includes the multi-token prediction layer of `CausalLM.predict_ahead`.

    The keys and values of this layer are last in the cache.
    """

    is_recurrent: bool = False
    """Whether any layer keeps a recurrent state, whose size does not depend on the sequence length."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts can share cached blocks: a token's keys must depend only on the tokens before it."""
        return not (self.keys_depend_on_length or self.needs_whole_prompt)

    def refuse_recurrent(self, setting: str, remedy: str = "leave it out") -> None:
        """Raise UserError if the model has recurrent layers, which `setting` does not support."""
        if self.is_recurrent:
            raise UserError(f"{setting} is not supported for a model with recurrent layers: {remedy}")
