/* The fuzz corpus, and a few thousand fixed mutations of it: truncations, flipped bits and random
 * edits. What libFuzzer once found stays found where there is no libFuzzer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>

#include "fuzz/fuzz_checkpoint.c"

#define CORPUS DSPARK_TEST_DATA "/../fuzz/corpus/checkpoint"
#define SEED   UINT64_C(0x9e3779b97f4a7c15)

static uint64_t random_state;

static uint64_t next_random(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* An exact allocation each time, so that a sanitizer sees the first byte read beyond the input. */
static void run(const uint8_t *bytes, size_t n)
{
    uint8_t *copy = malloc(n ? n : 1);
    if (n) memcpy(copy, bytes, n);
    LLVMFuzzerTestOneInput(copy, n);
    free(copy);
}

static size_t for_each_input(void (*visit)(const uint8_t *bytes, size_t n))
{
    static uint8_t bytes[1 << 16];
    char path[4096];
    size_t n_inputs = 0;
    DIR *stream = opendir(CORPUS);
    assert_non_null(stream);
    for (struct dirent *d = readdir(stream); d; d = readdir(stream)) {
        if (d->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", CORPUS, d->d_name);
        FILE *f = fopen(path, "rb");
        assert_non_null(f);
        size_t n = fread(bytes, 1, sizeof bytes, f);
        fclose(f);
        assert_true(n < sizeof bytes);
        visit(bytes, n);
        n_inputs++;
    }
    closedir(stream);
    return n_inputs;
}

static void test_corpus(void **state)
{
    (void)state;
    assert_true(for_each_input(run) >= 10);
}

static void truncate_everywhere(const uint8_t *bytes, size_t n)
{
    size_t step = n > 600 ? n / 300 : 1;
    for (size_t cut = 1; cut < n; cut += step) run(bytes, cut);
}

static void test_truncations(void **state)
{
    (void)state;
    for_each_input(truncate_everywhere);
}

static void flip_bits(const uint8_t *bytes, size_t n)
{
    static uint8_t copy[1 << 16];
    size_t step = n > 100 ? n / 60 : 1; /* every bit of the first bytes, then one byte in a few */
    memcpy(copy, bytes, n);
    for (size_t i = 1; i < n; i += i < 40 ? 1 : step) {
        for (int bit = 0; bit < 8; bit++) {
            copy[i] ^= (uint8_t)(1u << bit);
            run(copy, n);
            copy[i] = bytes[i];
        }
    }
}

static void test_bit_flips(void **state)
{
    (void)state;
    for_each_input(flip_bits);
}

static void edit_at_random(const uint8_t *bytes, size_t n)
{
    static const char words[] = "{}[]\",:0123456789-e.\\u\xff\x80 \n";
    static uint8_t copy[(1 << 16) + 64];
    for (int round = 0; n > 1 && round < 60; round++) {
        size_t m = n;
        memcpy(copy, bytes, n);
        for (uint64_t edits = 1 + next_random() % 4; edits > 0 && m > 1; edits--) {
            size_t at = 1 + next_random() % (m - 1), other = 1 + next_random() % (m - 1);
            switch (next_random() % 4) {
            case 0: copy[at] = (uint8_t)words[next_random() % (sizeof words - 1)]; break;
            case 1: copy[at] = copy[other]; break;
            case 2: /* take one out */
                memmove(copy + at, copy + at + 1, m - at - 1);
                m--;
                break;
            default: /* put one in */
                memmove(copy + at + 1, copy + at, m - at);
                copy[at] = (uint8_t)words[next_random() % (sizeof words - 1)];
                m++;
            }
        }
        run(copy, m);
    }
}

static void test_random_edits(void **state)
{
    (void)state;
    random_state = SEED;
    print_message("seed 0x%llx\n", (unsigned long long)SEED);
    for_each_input(edit_at_random);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_corpus),
        cmocka_unit_test(test_truncations),
        cmocka_unit_test(test_bit_flips),
        cmocka_unit_test(test_random_edits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
