from freehold.engine.cpu.compiling import share_scopes
from freehold.engine.cpu.kernel_cache import keep_kernels_by_content
from freehold.lost_kernels import compile_what_is_lost

keep_kernels_by_content()
compile_what_is_lost()
share_scopes()
