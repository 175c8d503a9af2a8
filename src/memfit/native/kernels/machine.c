/* What the machine can do. */
#include "kernels.h"

static int is_avx2_allowed = 1;

void memfit_allow_avx2(int is_allowed) { is_avx2_allowed = is_allowed; }

int memfit_has_avx2(void) {
#ifdef MEMFIT_FOR_AVX2
    __builtin_cpu_init();
    return is_avx2_allowed && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 0;
#endif
}

int memfit_has_avx512(void) {
#ifdef MEMFIT_FOR_AVX2
    return memfit_has_avx2() && __builtin_cpu_supports("avx512f");
#else
    return 0;
#endif
}
