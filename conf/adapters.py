"""Checks of adapters, and of paths by name, for schema.py."""

from collections.abc import Collection

from conf.errors import ErrorCode, UserError, list_known_names


def are_paths(paths: object) -> bool:
    """Whether a setting is a mapping from names to paths."""
    return isinstance(paths, dict) and all(isinstance(text, str) and text for pair in paths.items() for text in pair)


def check_adapters(names: Collection[str], chosen: str | None) -> None:
    """Raise UserError if `chosen` is not one of the adapter names."""
    if chosen is not None and chosen not in names:
        known = list_known_names(names, chosen) if names else "give model.adapters={NAME: FOLDER}, too"
        problem = f"predict.adapter={chosen} is none of model.adapters: {known}"
        raise UserError(problem, ErrorCode.unknown_value, "predict.adapter")
