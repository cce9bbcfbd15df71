"""Properties of a model that change how an engine serves it. Imports no torch."""

from dataclasses import dataclass


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

    @property
    def shares_prefixes(self) -> bool:
        """Whether a token's keys depend only on the tokens before it, so that prompts can share cached blocks."""
        return not (self.keys_depend_on_length or self.needs_whole_prompt)
