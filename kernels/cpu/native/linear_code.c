/* Entry point that codes the weights of panels (linear_code.h). */
#include "linear_code.h"

#include <string.h>

#include "linear.h"

enum {
    NO_NUMBER = TABLE_BYTES,
    SAMPLED_STEPS = 128, /* least steps from which a panel's values are chosen: about 20 samples of a value with a share of 1 in 1000 */
};

/* Mirrored in `quire/kernels/cpu/weight_code.py`. */
struct code_call {
    const char *rows;      /* [panels * PANEL_COLUMNS, steps] pairs of bfloat16; NULL: the one panel is packed in `scratch` */
    int64_t row_stride;    /* bytes */
    int64_t first_panel, panels, steps;
    uint8_t *tables;       /* for all panels of the weight, as in weight_code */
    int64_t *first;        /* for all panels of the weight, as in weight_code */
    uint8_t *coded;        /* [.., steps, CODED_STEP_BYTES], all panels of the weight */
    int32_t *apart;        /* as in weight_code, with room for all steps and a -1 after each panel */
    uint8_t *high;         /* as in weight_code, with the same room */
    int64_t used;          /* entries of `apart` and `high` in use; the call adds those of its panels */
    uint32_t *scratch;     /* [threads, steps, PANEL_COLUMNS + 1] */
    int64_t joined;        /* threads that have begun; set by the library */
    int64_t next_panel;    /* counter of the threads; set by the library */
};

/* Choose the most frequent high bytes, from all steps or from evenly spaced ones. */
static void choose_table(const uint8_t *weights, int64_t steps, uint8_t table[TABLE_BYTES]) {
    uint32_t counts[4][256] = {{0}}; /* four arrays: repeated increments of one counter would wait for each other */
    const int64_t stride = steps > SAMPLED_STEPS ? steps / SAMPLED_STEPS : 1;
    for (int64_t step = 0; step < steps; step += stride) {
        const uint8_t *of_step = weights + step * STEP_WEIGHTS * 2;
        for (int64_t i = 0; i < STEP_WEIGHTS; i += 4)
            for (int j = 0; j < 4; j++) counts[j][of_step[2 * (i + j) + 1]]++;
    }
    for (int value = 0; value < 256; value++) counts[0][value] += counts[1][value] + counts[2][value] + counts[3][value];
    for (int number = 0; number < TABLE_BYTES; number++) {
        int best = 0;
        for (int value = 1; value < 256; value++)
            if (counts[0][value] > counts[0][best]) best = value;
        table[number] = (uint8_t)best;
        counts[0][best] = 0;
    }
}

static void split_step(const uint8_t *weights, uint8_t low[STEP_WEIGHTS], uint8_t high[STEP_WEIGHTS]) {
    for (int64_t eight = 0; eight < STEP_WEIGHTS / 8; eight++) {
        const int64_t place = code_place(eight / 4, eight % 4 * 8);
        for (int i = 0; i < 8; i++) {
            low[place + i] = weights[16 * eight + 2 * i];
            high[place + i] = weights[16 * eight + 2 * i + 1];
        }
    }
}

/* Write a panel's coded steps, and the indices of its uncoded steps; returns the number of uncoded steps. */
static int64_t code_panel(const uint8_t *weights, int64_t steps, const uint8_t table[TABLE_BYTES], uint8_t *coded, int32_t *apart) {
    uint8_t numbers[256], high[STEP_WEIGHTS];
    memset(numbers, NO_NUMBER, sizeof numbers);
    for (int number = 0; number < TABLE_BYTES; number++) numbers[table[number]] = (uint8_t)number;
    int64_t num_apart = 0;
    for (int64_t step = 0; step < steps; step++, weights += STEP_WEIGHTS * 2, coded += CODED_STEP_BYTES) {
        split_step(weights, coded + NUMBER_BYTES, high);
        int all = 0;
        for (int i = 0; i < NUMBER_BYTES; i++) {
            const int lower = numbers[high[i]], upper = numbers[high[NUMBER_BYTES + i]];
            all |= lower | upper;
            coded[i] = (uint8_t)(lower | upper << 4);
        }
        if (all >= NO_NUMBER) apart[num_apart++] = (int32_t)step;
    }
    return num_apart;
}

static void code_worker(void *argument) {
    struct code_call *c = argument;
    uint32_t *pairs = c->scratch + __atomic_fetch_add(&c->joined, 1, __ATOMIC_RELAXED) * c->steps * (PANEL_COLUMNS + 1);
    const uint8_t *weights = (const uint8_t *)pairs;
    int32_t *apart = (int32_t *)(pairs + c->steps * PANEL_COLUMNS);
    for (int64_t i; (i = __atomic_fetch_add(&c->next_panel, 1, __ATOMIC_RELAXED)) < c->panels;) {
        const int64_t panel = c->first_panel + i;
        if (c->rows) linear_pack_panel(pairs, 0, c->steps, c->rows + i * PANEL_COLUMNS * c->row_stride, c->row_stride, 0, PANEL_COLUMNS);
        uint8_t *table = c->tables + panel * TABLE_BYTES;
        choose_table(weights, c->steps, table);
        const int64_t num_apart = code_panel(weights, c->steps, table, c->coded + panel * c->steps * CODED_STEP_BYTES, apart);
        const int64_t first = __atomic_fetch_add(&c->used, num_apart + 1, __ATOMIC_RELAXED);
        c->first[panel] = first;
        for (int64_t j = 0; j < num_apart; j++) {
            uint8_t low[STEP_WEIGHTS];
            split_step(weights + apart[j] * STEP_WEIGHTS * 2, low, c->high + (first + j) * STEP_WEIGHTS);
        }
        memcpy(c->apart + first, apart, (size_t)num_apart * sizeof *apart);
        c->apart[first + num_apart] = -1;
    }
}

int64_t quire_code_bytes(void) { return sizeof(struct code_call); }

/* `parallel` is the address of GOMP_parallel; NULL: run on the calling thread alone. */
void quire_code_panels(struct code_call *call, parallel_function *parallel, int64_t num_threads) {
    call->next_panel = call->joined = 0;
    team_run(code_worker, call, parallel, num_threads);
}
