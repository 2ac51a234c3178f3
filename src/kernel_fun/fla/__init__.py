"""fla's layers and models on our kernels.

    import kernel_fun.fla
    kernel_fun.fla.register()

:func:`register` makes us a backend of fla-core's own dispatch (>= 0.6): nothing of fla is replaced, and a
call we do not take goes on to fla, with our reason in fla's log and ours. :func:`patch` rebinds fla's names
instead, for fla-core 0.5, whose dispatch cannot reach ``chunk_kda``. ``KERNEL_FUN_FLA=0`` sends every call of
either past us.
"""

from kernel_fun.fla.patching import Patch, patch
from kernel_fun.fla.registration import register, registered, unregister

__all__ = ["Patch", "patch", "register", "registered", "unregister"]
