"""Checks of adapters, and of paths by name, for schema.py."""

from collections.abc import Collection

from conf.errors import UserError, check, list_known_names


def check_paths(key: str, paths: object) -> None:
    """Raise UserError for a setting that is neither null nor a mapping from names to paths."""
    if isinstance(paths, dict):
        are_paths = all(isinstance(text, str) and text for pair in paths.items() for text in pair)
    else:
        are_paths = paths is None
    check(are_paths, key, paths, "paths by name: {NAME: PATH, ...}")


def check_adapters(names: Collection[str], chosen: str | None) -> None:
    """Raise UserError if `chosen` is not one of the adapter names."""
    if chosen is not None and chosen not in names:
        known = list_known_names(names, chosen) if names else "give model.adapters={NAME: FOLDER}, too"
        raise UserError(f"predict.adapter={chosen} is none of model.adapters: {known}")
