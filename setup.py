"""Copy the recipes into the package, for ``allranks init --recipe``; all else is in pyproject.toml."""

from pathlib import Path
from shutil import copytree, ignore_patterns

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Builds the package, with the recipes in it."""

    def run(self) -> None:
        """Build, unless nothing is copied since the package is used from its sources (pip install -e)."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "allranks", "recipes")
            left = ignore_patterns("__pycache__", "runs", "checkpoints", "metrics.jsonl")
            copytree("recipes", target, ignore=left, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithRecipes})
