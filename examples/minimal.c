/* The shortest useful program: hidden states of the target in, every layer's cache entries out.
 *   cc minimal.c $(pkg-config --cflags --libs dspark) -o minimal && ./minimal CKPT */
#include <dspark/dspark.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 10, BLOCK = 16 };

int main(int argc, char **argv)
{
    dspark_model *model = NULL;
    dspark_context *ctx = NULL;
    dspark_cache *cache = NULL;
    dspark_error err = {0};
    uint16_t *taps = NULL;
    int status = 1;

    if (argc != 2) return fprintf(stderr, "usage: minimal CKPT\n"), 2;
    if (dspark_model_open(&model, argv[1], NULL, &err) != DSPARK_OK) goto done;
    if (dspark_context_create(&ctx, model, NULL, &err) != DSPARK_OK) goto done;
    if (dspark_cache_create(&cache, model, DSPARK_CACHE_BF16, BLOCK, 1, NULL, &err) != DSPARK_OK)
        goto done;

    /* Your engine's part: bf16 hidden states, T taps side by side, and where each entry belongs. */
    const dspark_config *config = dspark_model_config(model);
    const size_t row = (size_t)config->n_taps * config->tap_width;
    int64_t positions[N], slots[N];
    if (!(taps = malloc(N * row * sizeof *taps))) {
        err = (dspark_error){.code = DSPARK_ENOMEM, .where = "taps", .message = "out of memory"};
        goto done;
    }
    for (size_t i = 0; i < N * row; i++) taps[i] = (uint16_t)(0x3f80 + i % 64); /* 1 to 1.5 */
    for (int i = 0; i < N; i++) positions[i] = slots[i] = i;

    dspark_batch batch;
    dspark_run_info info;
    dspark_batch_init(&batch);
    batch.n_tokens = N;
    batch.taps = taps;
    batch.positions = positions;
    batch.slots = slots;
    if (dspark_context_run(ctx, &batch, dspark_cache_get_view(cache), &info, &err) != DSPARK_OK)
        goto done;
    printf("%zu positions, %zu entries in %u layers\n", info.n_rows, info.n_written,
           config->n_layers);
    status = 0;
done:
    if (status) fprintf(stderr, "%s: %s\n", err.where, err.message);
    free(taps);
    dspark_cache_free(cache);
    dspark_context_free(ctx);
    dspark_model_close(model);
    return status;
}
