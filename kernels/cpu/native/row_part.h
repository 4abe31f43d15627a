/* Loads and stores of up to 16 elements at the end of a row, for instruction sets without masked loads and stores. */
#include <string.h>

/* Load elements `first` to `first` + 15 of a row of `columns` elements, widened; zeros after the last one. */
FN v16 load_part(const char *row, int64_t first, int64_t columns, int dtype) {
    int bytes = dtype == FLOAT32 ? 4 : 2;
    if (columns - first >= LANES) return v_load_elements(row + first * bytes, dtype, LANES);
    char whole[LANES * 4] = {0};
    memcpy(whole, row + first * bytes, (columns - first) * bytes);
    return v_load_elements(whole, dtype, LANES);
}

/* Round and store the same elements; nothing is written after the last one. */
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
