/* The extents of the eight AMX registers: up to 16 rows of up to 64 bytes. The including file defines FN. */
enum { REGISTER_ROWS = 16, REGISTER_BYTES = 64 };

/* Operand of LDTILECFG, which takes 150 cycles. */
struct extents {
    _Alignas(64) uint8_t palette;
    uint8_t start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

FN struct extents no_extents(void) { return (struct extents){.palette = 1}; }

/* Set a register's extent to `rows` rows of `columns` elements of 32 bits. */
FN void set_extent(struct extents *e, int number, int rows, int columns) {
    e->rows[number] = (uint8_t)rows;
    e->row_bytes[number] = (uint16_t)(columns * 4);
}
