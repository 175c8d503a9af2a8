/* The bodies, and the table of them; NAME says for which machine. */
#include "mask_body.h"
#include "window_body.h"
#include "sparse_body.h"
#include "float_body.h"
#include "integer_body.h"
#include "sparse_float_body.h"
#include "window_backward_body.h"

kernel *const NAME(memfit, kernels)[NUM_KERNELS] = {
    [MASK_PACK] = mask_pack,         [MASK_PACK_BOOL] = mask_pack_bool, [MASK_UNPACK] = mask_unpack,
    [MASK_GATE] = mask_gate,         [WINDOW_PACK] = window_pack,       [WINDOW_UNPACK] = window_unpack,
    [SPARSE_COUNT] = sparse_count,   [SPARSE_ENCODE] = sparse_encode,   [SPARSE_DECODE] = sparse_decode,
    [CSR_ENCODE] = csr_encode,       [CSR_DECODE] = csr_decode,         [FP16_ENCODE] = fp16_encode,
    [FP16_DECODE] = fp16_decode,     [BF16_ENCODE] = bf16_encode,       [BF16_DECODE] = bf16_decode,
    [FP10_ENCODE] = fp10_encode,     [FP10_DECODE] = fp10_decode,       [FP8_ENCODE] = fp8_encode,
    [FP8_DECODE] = fp8_decode,       [INT8_ENCODE] = int8_encode,       [INT8_DECODE] = int8_decode,
    [INT4_ENCODE] = int4_encode,     [INT4_DECODE] = int4_decode,       [NARROW_ENCODE] = narrow_encode,
    [NARROW_DECODE] = narrow_decode, [WINDOW_BACKWARD] = window_backward,
    [SPARSE_FLOAT_COUNT] = sparse_float_count,   [SPARSE_FLOAT_ENCODE] = sparse_float_encode,
    [SPARSE_FLOAT_DECODE] = sparse_float_decode,
};
