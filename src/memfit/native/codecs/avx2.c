/* The same kernels for machines with AVX2; nothing here runs on others. */
#include "codecs.h"

#ifdef MEMFIT_HAS_AVX2_TABLE
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,bmi2,f16c,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi2,f16c,popcnt")
#endif

#define WITH_AVX2 1
#define NAME(first, last) first##_avx2_##last
#include "table_body.h"

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
