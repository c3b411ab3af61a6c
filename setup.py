"""What pyproject.toml cannot say yet without a warning: the few lines of C."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "strata.checkpoint.copying._stream",
            ["src/strata/checkpoint/copying/stream.c"],
            extra_compile_args=["-O2", "-g0"],  # Debugging symbols would name the folder of the build.
            optional=True,  # Without a compiler everything works, and copies take longer.
        )
    ]
)
