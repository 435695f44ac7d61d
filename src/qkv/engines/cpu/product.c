/* Matrix products: rows times a weight that was laid out in panels once, a tile of both at a time in registers.
 *
 * With bytes a row is rounded by its own largest number, and a weight has a scale for each output.
 */

#include "native.h"

enum { NEAR = 1 << 18 };  /* bytes of input that stay in the second cache while the weight comes by */
enum { ALONE = 1 << 20 }; /* byte products that are done before another thread would have begun */

size_t input_size(int64_t rows, int64_t width) { return (size_t)(up(rows * width, 64) + up(rows * 8, 64) + 64); }

/* The number of largest magnitude; if one is no number, that. Bits of magnitudes are ordered as they are. */
static float largest_of(const float *x, int64_t width) {
    VecBits most = {0};
    for (int64_t k = 0; k < width; k += LANES) {
        VecBits bits = (VecBits)magnitude(load(x + k));
#if defined(__AVX512F__)
        most = (VecBits)_mm512_max_epu32((__m512i)most, (__m512i)bits);
#else
        VecBits above = (VecBits)(bits > most);
        most = (above & bits) | (~above & most);
#endif
    }
    uint32_t found = 0;
    for (int i = 0; i < LANES; i++) found = most[i] > found ? most[i] : found;
    float number;
    memcpy(&number, &found, sizeof number);
    return number;
}

static void round_row(const float *x, int64_t width, int8_t *bytes, float *scale, int32_t *shift) {
    float most = largest_of(x, width), by = most > 0 ? 127.0f / most : most; /* what is no number stays none */
    uint32_t sum = 0; /* without a sign: what comes of no numbers may be too large, and is never looked at */
    typedef int8_t VecByte __attribute__((vector_size(LANES)));
    VecBits total = {0};
    for (int64_t k = 0; k < width; k += LANES) {
        Vec scaled = load(x + k) * by + 12582912.0f; /* rounds to the nearest */
        VecInt whole = (VecInt)scaled - 0x4b400000;
        total += (VecBits)whole;
        VecByte packed = __builtin_convertvector(whole, VecByte);
        memcpy(bytes + k, &packed, sizeof packed);
    }
    for (int i = 0; i < LANES; i++) sum += total[i];
    *scale = most / 127.0f;
    *shift = (int32_t)(0u - 128u * sum);
}

Input input(const Matrix *for_matrix, const float *x, int64_t rows, void *memory) {
    Input in = {.x = x, .rows = rows, .width = for_matrix->inputs};
    if (for_matrix->scale) {
        in.bytes = memory;
        in.scale = (float *)(in.bytes + up(rows * in.width, 64));
        in.shift = (int32_t *)(in.scale + rows);
        for (int64_t r = 0; r < rows; r++)
            round_row(x + r * in.width, in.width, in.bytes + r * in.width, in.scale + r, in.shift + r);
    }
    return in;
}

/* What a vector of a tile becomes; the last one may be cut. */
INLINE void finish(Vec sum, const Matrix *matrix, int64_t output, Into into, int64_t row) {
    int64_t left = into.outputs - output;
    if (left <= 0) return;
    float *y = into.y + (into.rows ? into.rows[row] : row) * into.row + output;
    if (matrix->bias) sum += load(matrix->bias + output);
    float cut[LANES];
    if (into.add) {
        if (left >= LANES) {
            sum += load(y);
        } else {
            memset(cut, 0, sizeof cut);
            memcpy(cut, y, (size_t)left * sizeof(float));
            sum += load(cut);
        }
    }
    if (into.relu) sum = largest(splat(0.0f), sum);
    if (left >= LANES) {
        store(y, sum);
    } else {
        store(cut, sum);
        memcpy(y, cut, (size_t)left * sizeof(float));
    }
}

INLINE void tile_of_floats(const int rows, const Input *x, int64_t row, const Matrix *matrix, int64_t output,
                           Into into) {
    Vec sum[TILE_ROWS][TILE_VECTORS] = {{{0}}};
    const float *in = x->x + row * x->width, *weight = (const float *)matrix->weight + output * matrix->inputs;
    const int64_t width = x->width;
    for (int64_t k = 0; k < width; k++) {
        Vec w[TILE_VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < TILE_VECTORS; j++) w[j] = load(weight + k * PANEL + j * LANES);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            const Vec each = splat(in[i * width + k]);
#pragma GCC unroll 4
            for (int j = 0; j < TILE_VECTORS; j++) sum[i][j] += each * w[j];
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < TILE_VECTORS; j++) finish(sum[i][j], matrix, output + j * LANES, into, row + i);
}

#if defined(__AVX512VNNI__)
int qkv_has_bytes(void) { return 1; }

/* By its name: what compilers make of the intrinsic does not stay in registers. */
INLINE void add_products(__m512i *sum, __m512i weights, __m512i inputs) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(weights), "v"(inputs));
}

INLINE void tile_of_bytes(const int rows, const Input *x, int64_t row, const Matrix *matrix, int64_t output,
                          Into into) {
    __m512i sum[TILE_ROWS][TILE_VECTORS];
    const int8_t *in = x->bytes + row * x->width;
    const uint8_t *weight = (const uint8_t *)matrix->weight + output * matrix->inputs;
    const int64_t width = x->width;
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < TILE_VECTORS; j++) sum[i][j] = _mm512_set1_epi32(x->shift[row + i]);
    for (int64_t k = 0; k < width; k += 4) {
        __m512i w[TILE_VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < TILE_VECTORS; j++) w[j] = _mm512_loadu_si512(weight + k * PANEL + j * 64);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            int32_t four;
            memcpy(&four, in + i * width + k, sizeof four);
            const __m512i each = _mm512_set1_epi32(four);
#pragma GCC unroll 4
            for (int j = 0; j < TILE_VECTORS; j++) add_products(&sum[i][j], w[j], each);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < TILE_VECTORS; j++) {
            Vec counts = load(matrix->scale + output + j * LANES) * x->scale[row + i];
            Vec counted = (Vec)_mm512_cvtepi32_ps(sum[i][j]) * counts;
            finish(counted, matrix, output + j * LANES, into, row + i);
        }
}
#else
int qkv_has_bytes(void) { return 0; }
#define tile_of_bytes tile_of_floats /* never called: Python offers no bytes here */
#endif

#define TILES(tile)                                                                                                    \
    switch (rows) {                                                                                                    \
    case 1: tile(1, x, row, matrix, output, into); break;                                                              \
    case 2: tile(2, x, row, matrix, output, into); break;                                                              \
    case 3: tile(3, x, row, matrix, output, into); break;                                                              \
    case 4: tile(4, x, row, matrix, output, into); break;                                                              \
    case 5: tile(TILE_ROWS > 4 ? 5 : 1, x, row, matrix, output, into); break;                                          \
    default: tile(TILE_ROWS, x, row, matrix, output, into);                                                            \
    }

static void tiles_of_floats(int64_t rows, const Input *x, int64_t row, const Matrix *matrix, int64_t output,
                            Into into) {
    TILES(tile_of_floats)
}

static void tiles_of_bytes(int64_t rows, const Input *x, int64_t row, const Matrix *matrix, int64_t output, Into into) {
    TILES(tile_of_bytes)
}

typedef struct {
    const Input *x;
    const Matrix *matrix;
    Into into;
} Product;

/* Some panels of a weight. */
static void multiply_panels(void *data, int64_t first_panel, int64_t end_panel, int thread) {
    (void)thread;
    const Input *x = ((Product *)data)->x;
    const Matrix *matrix = ((Product *)data)->matrix;
    const Into into = ((Product *)data)->into;
    int64_t some = NEAR / (x->width * (matrix->scale ? 1 : 4)) / TILE_ROWS * TILE_ROWS;
    if (some < TILE_ROWS) some = TILE_ROWS;
    for (int64_t first = 0; first < x->rows; first += some) {
        int64_t end = first + some < x->rows ? first + some : x->rows;
        for (int64_t output = first_panel * PANEL; output < end_panel * PANEL; output += PANEL)
            for (int64_t row = first; row < end; row += TILE_ROWS) {
                int64_t rows = end - row < TILE_ROWS ? end - row : TILE_ROWS;
                if (matrix->scale)
                    tiles_of_bytes(rows, x, row, matrix, output, into);
                else
                    tiles_of_floats(rows, x, row, matrix, output, into);
            }
    }
}

void product(const Input *x, const Matrix *matrix, Into into, int64_t threads) {
    Product all = {x, matrix, into};
    int64_t work = x->rows * x->width * matrix->outputs * (matrix->scale ? 1 : 4);
    in_parallel(work < ALONE ? 1 : threads, matrix->outputs / PANEL, multiply_panels, &all);
}

/* For Python to see whether it is right: x (rows, inputs) to y (rows, outputs). */
void qkv_product(const Matrix *matrix, const float *x, int64_t rows, float *y, int64_t outputs, int relu,
                 void *memory) {
    Input in = input(matrix, x, rows, memory);
    product(&in, matrix, (Into){y, outputs, outputs, relu, 0, NULL}, 1);
}
