/* 16 elements of a row that may have fewer left: not every instruction set loads and stores any number of them. */
#include <string.h>

/* Elements `first` to `first` + 15 of a row of `columns`, widened; zeros after the last. */
FN v16 load_part(const char *row, int64_t first, int64_t columns, int dtype) {
    int bytes = dtype == FLOAT32 ? 4 : 2;
    if (columns - first >= LANES) return v_load_elements(row + first * bytes, dtype, LANES);
    char whole[LANES * 4] = {0};
    memcpy(whole, row + first * bytes, (columns - first) * bytes);
    return v_load_elements(whole, dtype, LANES);
}

/* The same elements, rounded; nothing is written after the last. */
FN void store_part(char *row, int64_t first, int64_t columns, int dtype, v16 x) {
    int bytes = dtype == FLOAT32 ? 4 : 2;
    if (columns - first >= LANES) {
        v_store_elements(row + first * bytes, dtype, LANES, x);
        return;
    }
    char whole[LANES * 4];
    v_store_elements(whole, dtype, LANES, x);
    memcpy(row + first * bytes, whole, (columns - first) * bytes);
}
