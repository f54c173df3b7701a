/* dump: hidden-state dumps in the extraction format, one safetensors file a sample:
 *   token_ids      [seq] I64 or I32
 *   hidden_states  [seq, T+1, w] BF16: the T taps in layer order, then the verifier's final state;
 *                  or [seq, T, w] without it
 *   positions      [seq] I64, optional, gapless
 * Checks everything that a reader would rely on. Never writes. */
#ifndef DSPARK_CLI_DUMP_H
#define DSPARK_CLI_DUMP_H

#include <sys/stat.h>

#include "dspark/dspark.h"

typedef struct dump {
    dspark_checkpoint *file;
    const char *path;
    const unsigned char *taps; /* first tap of the first row, any alignment */
    uint64_t n_rows;
    size_t row_bytes;          /* the T taps of one row */
    size_t stride;             /* bytes from row to row in the file */
    uint32_t n_taps;
    uint32_t tap_width;
    int has_verifier;
    int has_positions;
    uint64_t first_position;   /* of the first row, when has_positions */
    const dspark_tensor *ids;    /* NULL for rows made by dump_make, as states */
    const dspark_tensor *states; /* NULL for rows made by dump_make */
    unsigned char *owned;        /* rows made by dump_make */
    struct stat opened;          /* of the file, before it was opened; st_ino is 0 when it is not known */
} dump;

/* Header, shapes, token ids and positions; the states themselves are not read here. */
dspark_status dump_open(dump *d, const char *path, const dspark_config *config, dspark_error *err);
/* Rows of pseudo-random taps in memory, roughly normal; the same seed gives the same rows. */
dspark_status dump_make(dump *d, uint64_t n_rows, uint64_t seed, const dspark_config *config,
                        dspark_error *err);
/* The token id of a row of a file. */
int64_t dump_token(const dump *d, uint64_t row);
/* DSPARK_ENONFINITE naming row and tap when a value of these rows is not finite. */
dspark_status dump_check_rows(const dump *d, uint64_t first, uint64_t n, dspark_error *err);
/* The position of the first row: what the user said (`given`) or what the dump says; they must not
 * contradict each other. Without either it is 0. */
dspark_status dump_start(const dump *d, int given, uint64_t asked, uint64_t *start,
                         dspark_error *err);
/* Where the rows lie: start + n_rows must not pass config->max_positions. */
dspark_status dump_check_window(const dump *d, uint64_t start, const dspark_config *config,
                                dspark_error *err);
/* These rows have been used: their pages need not stay in memory. */
void dump_forget_rows(const dump *d, uint64_t first, uint64_t n);
/* What comes of rows of the dump, a batch with first_row (from their taps or their states), is st. When
 * something is not finite, *err tells of the first row with which anything is wrong, whatever the batch: a row
 * before the one that was met may overflow later on the way. It is told of the dump, or of the checkpoint when
 * ordinary rows overflow in it. Returns what *err says. */
dspark_status dump_first_fault(const dump *d, const char *checkpoint, dspark_context *context,
                               const dspark_batch *batch, const dspark_cache_view *view, dspark_status st,
                               dspark_error *err);
/* DSPARK_EIO when the file was written to since it was opened: rows may be of both. One that was replaced by
 * another file is still whole here. */
dspark_status dump_check_unchanged(const dump *d, dspark_error *err);
void dump_close(dump *d);

/* What the taps look like, row by row: enough to see a dump whose taps were never filled, filled
 * twice, or whose rows stand still. */
typedef struct dump_stats {
    uint64_t n_rows;
    double squares[DSPARK_MAX_TAPS];
    unsigned char differ[DSPARK_MAX_TAPS][DSPARK_MAX_TAPS]; /* [t][u], t < u: in some row */
    uint64_t n_repeated;     /* rows that are equal to the row before them */
    uint64_t first_repeated;
    char last[33];           /* digest of the last row: its pages may be gone */
} dump_stats;
/* Rows must come in order. */
void dump_stats_add(dump_stats *s, const dump *d, uint64_t first, uint64_t n);
/* Root mean square of one tap. */
double dump_stats_rms(const dump_stats *s, const dump *d, uint32_t tap);
#define DUMP_MAX_WARNINGS 8
/* What deserves a look; returns how many of `texts` were filled. */
size_t dump_stats_warn(const dump_stats *s, const dump *d, char texts[DUMP_MAX_WARNINGS][160]);

/* A digest of rows that does not depend on how they are cut into batches:
 *   chain = 32 zero digits; for each row: chain = digest(chain | digest(row)), as hex text. */
typedef struct row_digest {
    char hex[33];
} row_digest;
void row_digest_start(row_digest *chain);
void row_digest_add(row_digest *chain, const void *row, size_t n_bytes);

#endif
