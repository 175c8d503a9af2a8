/* The kernels for any machine. */
#include "codecs.h"

#define NAME(first, last) first##_plain_##last
#include "table_body.h"
