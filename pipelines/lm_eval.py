"""lm_eval's own command with our models: `python -m pipelines.lm_eval --model quintet --model_args model=tiny --tasks ...`."""

from lm_eval.__main__ import cli_evaluate

from pipelines.tasks.lm_eval import QuintetLM

__all__ = ["QuintetLM"]  # its import registers the model `quintet`

if __name__ == "__main__":
    cli_evaluate()
