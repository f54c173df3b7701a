/* Faults of others (docs/faults.md) about quantised shards and caches: each input through the library or
 * the command, as a user would meet it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "dspark/dspark.h"
#include "support/cli_said.h"
#include "support/drafting.h"
#include "support/fixture.h"

#define N_LAYERS 5

static dspark_error err;
#define must(call) check((call), DSPARK_OK, &err)

static int make_inputs(void **state)
{
    (void)state;
    if (run_cli("synth tiny --preset tiny").code) return 1;
    return run_cli("synth --dump dump.st --for tiny --tokens 20").code;
}

/* ---- shards ---- */

/* faults.md Q3: a rule that names layer 3 by the checkpoint's number reaches layer 3 and no other, in what
 * is said and in what is computed. The shape of a rule is that of compressed-tensors: the parent's name. */
static void only_the_named_layer_is_plain(void **state)
{
    json_t *doc, *ignore;
    const json_t *list;
    cli_result r;
    size_t i, n = 0;
    (void)state;
    assert_int_equal(run_cli("quantize tiny q3 --format fp8 --no-compare --ignore re:layers.3.self_attn "
                             "--ignore context_proj").code, 0);
    doc = json_load_file(in_folder("q3/config.json"), 0, NULL);
    assert_non_null(doc);
    ignore = json_object_get(json_object_get(doc, "quantization_config"), "ignore");
    assert_true(json_array_size(ignore) > 5);
    for (i = json_array_size(ignore); i-- > 0;)
        if (strncmp(json_string_value(json_array_get(ignore, i)), "layers.3.self_attn.", 19) == 0) {
            json_array_remove(ignore, i);
            n++;
        }
    assert_int_equal(n, 5); /* kv_b too */
    json_array_append_new(ignore, json_string("layers.3.self_attn"));
    assert_int_equal(json_dump_file(doc, in_folder("q3/config.json"), 0), 0);
    json_decref(doc);
    r = run_cli("inspect q3 --json");
    assert_int_equal(r.code, 0);
    doc = said_json(&r);
    list = json_object_get(json_object_get(doc, "quantisation"), "linears");
    for (i = n = 0; i < json_array_size(list); i++) {
        const json_t *linear = json_array_get(list, i);
        const char *name = said_text(linear, "name");
        if (!strstr(name, "kv_a_proj_with_mqa")) continue;
        assert_string_equal(said_text(linear, "scheme"),
                            strstr(name, "layers.3.") ? "bf16" : "fp8_channel");
        n++;
    }
    assert_int_equal(n, N_LAYERS);
    json_decref(doc);
    assert_int_equal(run_cli("context tiny --taps dump.st --out plain.st").code, 0);
    assert_int_equal(run_cli("context q3 --taps dump.st --out some.st").code, 0);
    r = run_cli("compare plain.st some.st --json");
    assert_int_equal(r.code, 1);
    doc = said_json(&r);
    list = json_object_get(doc, "layers");
    assert_int_equal(json_array_size(list), 2 * N_LAYERS);
    for (i = 0; i < 2 * N_LAYERS; i++) {
        const json_t *part = json_array_get(list, i);
        assert_int_equal(said_int(part, "elements_different") == 0, said_int(part, "layer") == 3);
    }
    json_decref(doc);
}

/* ---- caches ---- */

/* A copy of `from` with the scales of a KV cache in it. */
static void add_cache_scales(const char *from, const char *to, float k_scale)
{
    char source[900], path[900], name[64];
    const uint64_t one = 1;
    dspark_checkpoint *c;
    dspark_writer *w;
    size_t i;
    int l;
    snprintf(source, sizeof source, "%s/%s", cli_folder(), from);
    assert_int_equal(run_cli("synth %s --preset tiny", to).code, 0); /* a folder with its config */
    snprintf(path, sizeof path, "%s/%s/model.safetensors", cli_folder(), to);
    must(dspark_checkpoint_open(&c, source, &err));
    must(dspark_writer_create(&w, path, &err));
    for (i = 0; i < dspark_checkpoint_tensor_count(c); i++) {
        const dspark_tensor *t = dspark_checkpoint_tensor(c, i);
        must(dspark_writer_declare(w, t->name, t->dtype, t->rank, t->shape, &err));
    }
    for (l = 0; l < N_LAYERS; l++) {
        snprintf(name, sizeof name, "layers.%d.self_attn.k_scale", l);
        must(dspark_writer_declare(w, name, DSPARK_F32, 1, &one, &err));
    }
    for (i = 0; i < dspark_checkpoint_tensor_count(c); i++) {
        const dspark_tensor *t = dspark_checkpoint_tensor(c, i);
        must(dspark_writer_data(w, t->data, t->n_bytes, &err));
    }
    for (l = 0; l < N_LAYERS; l++) must(dspark_writer_data(w, &k_scale, sizeof k_scale, &err));
    must(dspark_writer_commit(w, &err));
    dspark_checkpoint_close(c);
}

/* faults.md C4: scales that lie in the file do not reach a cache that has none. */
static void scales_in_the_file_leave_a_bf16_cache_alone(void **state)
{
    (void)state;
    add_cache_scales("tiny", "scaled", 0.06f);
    assert_int_equal(run_cli("context tiny --taps dump.st --out without.st").code, 0);
    assert_int_equal(run_cli("context scaled --taps dump.st --out with.st").code, 0);
    assert_int_equal(run_cli("compare without.st with.st").code, 0);
}

/* faults.md C2, C5, C6: bf16 unless it is asked for; scales of the caller's are used, counted and told;
 * an unknown format is answered with those that are known. */
static void cache_formats_are_the_callers(void **state)
{
    cli_result r = run_cli("context tiny --taps dump.st --json");
    json_t *doc = said_json(&r);
    (void)state;
    assert_string_equal(said_text(doc, "cache_dtype"), "bf16");
    json_decref(doc);
    r = run_cli("context tiny --taps dump.st --cache-dtype fp8_e4m3 --json");
    doc = said_json(&r);
    assert_int_equal(json_array_size(json_object_get(doc, "scales")), N_LAYERS);
    assert_true(json_number_value(json_array_get(json_object_get(doc, "scales"), 4)) == 1);
    json_decref(doc);
    assert_has(run_cli("context tiny --taps dump.st --cache-dtype fp8_e4m3").out, "scale 1 in every layer\n");
    assert_int_equal(run_cli("context tiny --taps dump.st --cache-dtype fp8_e4m3 --out s1.st").code, 0);
    assert_int_equal(run_cli("context tiny --taps dump.st --cache-dtype fp8_e4m3 --out s2.st "
                             "--scales 1,1,4,1,1").code, 0);
    assert_has(run_cli("context tiny --taps dump.st --cache-dtype fp8_e5m2 --scales 1,1,4,1,0.5").out,
               "scales 1, 1, 4, 1, 0.5\n");
    r = run_cli("compare s1.st s2.st --json"); /* layer 2 alone has other codes */
    doc = said_json(&r);
    for (size_t i = 0; i < 2 * N_LAYERS; i++) {
        const json_t *part = json_array_get(json_object_get(doc, "layers"), i);
        assert_int_equal(said_int(part, "elements_different") > 0, said_int(part, "layer") == 2);
    }
    json_decref(doc);
    r = run_cli("context tiny --taps dump.st --cache-dtype fp8_e4m3 --scales 1,1,1,1");
    assert_int_equal(r.code, 2);
    assert_has(r.err, "expected 5 numbers");
    r = run_cli("context tiny --taps dump.st --cache-dtype nvfp4");
    assert_int_equal(r.code, 2);
    assert_has(r.err, "fp8_ds_mla");
}

/* faults.md C1: a cache of fewer bits drafts nearly what bf16 drafts, at every position of the block. */
static void an_fp8_cache_drafts_nearly_the_same(void **state)
{
    enum { ANCHORS = 40 };
    static const struct {
        dspark_cache_dtype dtype;
        const char *name;
        double least; /* share of first tokens that agree */
    } cases[] = {{DSPARK_CACHE_FP8_E4M3, "fp8_e4m3", 0.8}, {DSPARK_CACHE_FP8_E5M2, "fp8_e5m2", 0.7}};
    drafting t;
    (void)state;
    drafting_open(&t, NULL, 0);
    dspark_drafter *d = drafting_drafter(&t, DSPARK_ISA_AUTO, 1, 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint32_t equal[32] = {0};
        for (int32_t a = 0; a < ANCHORS; a++) {
            answer *want = drafting_raw(&t, d, DSPARK_CACHE_BF16, 30 + (size_t)a, a);
            answer *got = drafting_raw(&t, d, cases[i].dtype, 30 + (size_t)a, a);
            for (uint32_t k = 0; k < t.config->block_size && got->out.tokens[k] == want->out.tokens[k]; k++) equal[k]++;
            answer_free(want);
            answer_free(got);
        }
        print_message("  %s, prefixes equal to bf16's, of %d:", cases[i].name, ANCHORS);
        for (uint32_t k = 0; k < t.config->block_size; k++) print_message(" %u", equal[k]);
        print_message("\n");
        assert_true(equal[0] >= cases[i].least * ANCHORS);
        assert_true(equal[t.config->block_size - 1] > 0);
    }
    dspark_drafter_free(d);
    drafting_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_the_named_layer_is_plain),
        cmocka_unit_test(scales_in_the_file_leave_a_bf16_cache_alone),
        cmocka_unit_test(cache_formats_are_the_callers),
        cmocka_unit_test(an_fp8_cache_drafts_nearly_the_same),
    };
    return cmocka_run_group_tests(tests, make_inputs, remove_folder);
}
