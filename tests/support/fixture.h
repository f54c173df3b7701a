/* A tiny synthetic model with rows to feed it and a host's cache to fill: what the context tests
 * stand on. Failures end the running cmocka test. */
#ifndef DSPARK_TESTS_SUPPORT_FIXTURE_H
#define DSPARK_TESTS_SUPPORT_FIXTURE_H

#include <stddef.h>
#include <stdint.h>

#include "dspark/dspark.h"

#define MAX_ROWS 1000
#define CACHE_SLOTS 1024

typedef struct fixture {
    char dir[512];
    int owned;                   /* closing removes the folder */
    dspark_model *model;
    size_t taps_width, width, n_layers;
    uint16_t *taps;              /* [MAX_ROWS][taps_width] */
    int64_t positions[MAX_ROWS];
    int64_t slots[MAX_ROWS];     /* a permutation within CACHE_SLOTS */
} fixture;

/* settings: "key=value" for the tiny preset. */
void open_fixture(fixture *f, const char *const *settings, size_t n_settings);
/* The same rows for a checkpoint that is there already; closing leaves its files alone. */
void open_fixture_at(fixture *f, const char *dir, int vllm_compat);
void close_fixture(fixture *f);
/* For cmocka: *state is a fixture with the preset's own settings. */
int fixture_setup(void **state);
int fixture_teardown(void **state);

/* Fails with the error's text unless got == want. */
void check(dspark_status got, dspark_status want, const dspark_error *err);
uint64_t next_random(uint64_t *s);

/* CACHE_SLOTS slots in blocks of 16, every byte 0x5a, in memory of the test's own. */
typedef struct host_cache {
    dspark_cache_view view;
    void *layers[8];
    unsigned char *memory;
    size_t bytes;
} host_cache;

void open_cache(host_cache *h, const fixture *f, dspark_cache_dtype dtype);

dspark_batch batch_of(const fixture *f, size_t row, size_t n);
dspark_context *open_context(const fixture *f, dspark_isa isa, uint32_t threads, dspark_path path,
                             uint32_t max_tokens);
/* Run n rows in calls of `batch` rows; all must be written. */
void run_rows(dspark_context *ctx, const fixture *f, host_cache *h, size_t n, size_t batch);
/* n rows by the reference kernels, one thread, one call. */
void reference_run(const fixture *f, host_cache *h, dspark_cache_dtype dtype, size_t n);

/* Sanitizers are slow and look for other things: a sample of the combinations is enough there. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SAMPLE = 1, LONG_BATCH = 400 };
#else
enum { SAMPLE = 0, LONG_BATCH = MAX_ROWS };
#endif

/* n rows by every path, level, thread count and batch size against the reference, with ==. Not
 * thorough: a sample of the combinations. */
void compare_everything(const fixture *f, dspark_cache_dtype dtype, size_t n, int thorough);

/* Element `column` of a row's entry in a bf16 cache. */
float entry_value(const host_cache *h, const fixture *f, size_t layer, size_t row, size_t column);
/* The largest difference of n rows from the fp64 twin, over the root mean square of its entries. */
double error_of_fp64(const fixture *f, size_t n);

#endif
