"""What pyproject.toml cannot say: the sources of a library are compiled at the same time, one for each core."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildAtOnce(build_ext):
    """`build_ext --parallel` builds several libraries at once; here most sources belong to one."""

    def build_extension(self, ext: Extension) -> None:
        """Build one library."""
        compile_all = self.compiler.compile

        def compile_at_once(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_all([source], **options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_at_once
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_all


setup(cmdclass={"build_ext": BuildAtOnce})
