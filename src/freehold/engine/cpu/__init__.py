from freehold.engine.cpu.compiling import share_scopes
from freehold.engine.cpu.kernel_cache import keep_kernels_by_content

keep_kernels_by_content()
share_scopes()
