# Apache-2.0, as Sluice itself.
from spack_repo.builtin.build_systems.makefile import MakefilePackage

from spack.package import *


class Sluice(MakefilePackage):
    """Fractions of remote GPUs for Slurm jobs: the command sluice, and the libraries libcuda.so.1 and libnvidia-ml.so.1 that
    its programs load in place of the driver's. The daemon and the parts for Slurm come from the packages of each node."""

    homepage = "https://github.com/sluice-hpc/sluice"
    git = "https://github.com/sluice-hpc/sluice.git"

    license("Apache-2.0", checked_by="sluice-hpc")

    version("main", branch="main")

    depends_on("c", type="build")
    depends_on("go@1.26:", type="build")

    requires("target=x86_64: platform=linux", msg="Sluice is for x86-64 Linux")

    build_targets = ["client"]

    @property
    def install_targets(self):
        return [f"PREFIX={self.prefix}", "install-client"]

    # No LD_LIBRARY_PATH: jobs and `sluice run` set it themselves. In the environment of a job an unload would take the job's GPU away.

    @run_after("install")
    def check_install(self):
        Executable(self.prefix.bin.sluice)("version")
