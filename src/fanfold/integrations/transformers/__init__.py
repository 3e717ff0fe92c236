"""fanfold inside transformers: `register()` and, for checkpoints on disk, `fanfold.load_model`."""

from fanfold.errors import UnavailableError

try:
    import transformers as transformers
except ImportError as error:
    raise UnavailableError(
        "transformers",
        found=str(error),
        expected="transformers 5.17 or newer, which loads models and generates text",
        next_step="Install it: pip install 'fanfold[hf]'. fanfold.load_experts and fanfold.inspect work without.",
    ) from error

from fanfold.integrations.transformers.interface import register as register
