/* dspark inspect: the document of dspark_inspection_json as text. A key that is null or missing is
 * left out: what is not known is not shown. Tensors that are equal in every layer share a line. */
#include "inspect.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "out.h"

#define LABEL_WIDTH 12
#define SHOWN_PROBLEMS 40

/* ---- access ---- */

static const char *text_of(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

static uint64_t uint_of(const json_t *object, const char *key)
{
    json_int_t n = json_integer_value(json_object_get(object, key));
    return n < 0 ? 0 : (uint64_t)n;
}

static double real_of(const json_t *object, const char *key)
{
    return json_number_value(json_object_get(object, key));
}

static int is_true(const json_t *object, const char *key)
{
    return json_is_true(json_object_get(object, key));
}

/* ---- lines ---- */

static void begin_line(const char *label)
{
    printf("%-*s", LABEL_WIDTH, label);
}

static void put_count(const char *before, uint64_t n, const char *behind)
{
    char text[32];
    printf("%s%s%s", before, n >= 10000 ? out_count(text, n)
                                        : (snprintf(text, sizeof text, "%" PRIu64, n), text),
           behind);
}

static void put_bytes(const char *before, uint64_t n, const char *behind)
{
    char text[32];
    printf("%s%s%s", before, out_bytes(text, (double)n), behind);
}

/* An array of sentences, one a line; the label stands before the first. */
static void print_sentences(const char *label, const json_t *array)
{
    size_t i;
    for (i = 0; i < json_array_size(array); i++) {
        begin_line(i ? "" : label);
        printf("- ");
        out_text(stdout, json_string_value(json_array_get(array, i)));
        putchar('\n');
    }
}

/* ---- what it is ---- */

static void print_family(const json_t *doc)
{
    const json_t *family = json_object_get(doc, "family"), *files = json_object_get(doc, "files");
    uint64_t n_bytes = 0;
    size_t i, n = json_array_size(files);
    begin_line("checkpoint");
    out_text(stdout, text_of(doc, "path"));
    putchar('\n');
    begin_line("what it is");
    out_text(stdout, text_of(family, "text"));
    putchar('\n');
    if (*text_of(family, "dialect")) {
        begin_line("names");
        out_text(stdout, text_of(family, "dialect"));
        printf(" dialect%s\n", is_true(family, "model_prefix") ? ", with \"model.\" in front" : "");
    }
    if (!n) return;
    begin_line("files");
    for (i = 0; i < n; i++) {
        const json_t *file = json_array_get(files, i);
        n_bytes += uint_of(file, "bytes");
        if (n > 6 && i >= 3) continue;
        if (i) printf(", ");
        out_text(stdout, text_of(file, "name"));
        put_bytes(" (", uint_of(file, "bytes"), ")");
    }
    if (n > 6) printf(" and %zu more", n - 3);
    put_bytes("; ", n_bytes, "\n");
}

static void print_rope(const json_t *config)
{
    const json_t *rope = json_object_get(config, "rope");
    int yarn = strcmp(text_of(rope, "rope_type"), "yarn") == 0;
    begin_line("RoPE");
    out_text(stdout, yarn ? "YaRN" : "plain");
    printf(", theta %.9g", real_of(rope, "rope_theta"));
    if (yarn) {
        printf(", factor %.9g", real_of(rope, "factor"));
        put_count(", trained window ", uint_of(rope, "original_max_position_embeddings"), "");
        printf(", beta %.9g and %.9g, mscale %.9g and %.9g", real_of(rope, "beta_fast"),
               real_of(rope, "beta_slow"), real_of(rope, "mscale"),
               real_of(rope, "mscale_all_dim"));
        if (real_of(rope, "extrapolation_factor") != 1 || real_of(rope, "attn_factor") != 1)
            printf(", extrapolation %.9g, attention %.9g", real_of(rope, "extrapolation_factor"),
                   real_of(rope, "attn_factor"));
    }
    put_count("; ", uint_of(config, "max_position_embeddings"), " positions\n");
}

static void print_taps(const json_t *config)
{
    const json_t *layers = json_object_get(config, "target_layer_ids");
    size_t i;
    begin_line("taps");
    put_count("", json_array_size(layers), " of width ");
    put_count("", uint_of(config, "target_hidden_size"), ", after target layers ");
    for (i = 0; i < json_array_size(layers); i++)
        printf("%s%" JSON_INTEGER_FORMAT, i ? ", " : "",
               json_integer_value(json_array_get(layers, i)));
    if (uint_of(config, "target_num_hidden_layers"))
        put_count(" of ", uint_of(config, "target_num_hidden_layers"), "");
    printf("; stream %s; %s\n", text_of(config, "aux_hidden_stream"),
           is_true(config, "fc_norm") ? "each normed (fc_norm)" : "not normed");
}

static const char *whose(const json_t *doc, const char *key)
{
    return strcmp(text_of(doc, key), "own") == 0 ? "own (used instead of the target's)"
                                                 : "absent (the target's)";
}

static void print_heads(const json_t *doc, const json_t *config)
{
    const char *state = text_of(doc, "confidence_head");
    int cut = is_true(config, "context_only");
    if (cut && strcmp(state, "absent") == 0) state = "not in this cut";
    begin_line("heads");
    printf("Markov %s", text_of(config, "markov_head_type"));
    put_count(", rank ", uint_of(config, "markov_rank"), "");
    printf("; confidence head %s", *state ? state : "unknown");
    if (is_true(config, "enable_confidence_head"))
        printf(" (reads the hidden state%s)",
               is_true(config, "confidence_head_with_markov") ? " and the Markov embedding" : "");
    if (cut && strcmp(text_of(doc, "lm_head"), "absent") == 0)
        printf("; embed_tokens and lm_head not in this cut");
    else if (*text_of(doc, "embed_tokens"))
        printf("; embed_tokens %s, lm_head %s", whose(doc, "embed_tokens"), whose(doc, "lm_head"));
    putchar('\n');
}

static void print_config(const json_t *doc)
{
    const json_t *config = json_object_get(doc, "config");
    if (!json_is_object(config)) return;
    begin_line("geometry");
    put_count("hidden ", uint_of(config, "hidden_size"), "");
    put_count(", intermediate ", uint_of(config, "intermediate_size"), "");
    put_count(", ", uint_of(config, "num_hidden_layers"),
              uint_of(config, "num_hidden_layers") == 1 ? " layer" : " layers");
    put_count(", ", uint_of(config, "num_attention_heads"), " heads");
    put_count(", vocabulary ", uint_of(config, "vocab_size"), "\n");
    begin_line("MLA");
    put_count("latent ", uint_of(config, "kv_lora_rank"), "");
    put_count(" + rope key ", uint_of(config, "qk_rope_head_dim"), "");
    put_count(", q rank ", uint_of(config, "q_lora_rank"), "");
    put_count(", nope ", uint_of(config, "qk_nope_head_dim"), "");
    put_count(", value ", uint_of(config, "v_head_dim"), "");
    printf(", norm eps %.9g\n", real_of(config, "rms_norm_eps"));
    print_taps(config);
    print_rope(config);
    begin_line("block");
    put_count("", uint_of(config, "block_size"), " tokens, ");
    printf("%s inside; mask token %" PRIu64, is_true(config, "is_causal") ? "causal" : "non-causal",
           uint_of(config, "mask_token_id"));
    if (real_of(config, "logit_scale") != 1)
        printf("; logit scale %.9g", real_of(config, "logit_scale"));
    putchar('\n');
    print_heads(doc, config);
    if (is_true(config, "context_only")) {
        begin_line("part");
        printf("context KV only (dspark_parts)\n");
    }
}

/* ---- tensors ---- */

/* "layers.3.mlp.up_proj.weight" -> 3, with the text around the number; -1 for other names. */
static long layer_of(const char *name, size_t *before, const char **after)
{
    const char *at = strncmp(name, "layers.", 7) == 0 ? name : strstr(name, ".layers.");
    char *end;
    long layer;
    if (!at) return -1;
    at = strstr(at, "layers.") + 7;
    if (*at < '0' || *at > '9') return -1;
    layer = strtol(at, &end, 10);
    if (*end != '.' || layer > 1000000) return -1;
    *before = (size_t)(at - name);
    *after = end;
    return layer;
}

static int same_member(const json_t *a, const json_t *b, const char *key)
{
    const json_t *x = json_object_get(a, key), *y = json_object_get(b, key);
    return x == y || (x && y && json_equal((json_t *)x, (json_t *)y));
}

/* Do two tensors differ only in the number of their layer? */
static int same_but_layer(const json_t *a, const json_t *b)
{
    const char *x = text_of(a, "name"), *y = text_of(b, "name"), *x_after, *y_after;
    size_t x_before, y_before;
    if (layer_of(x, &x_before, &x_after) < 0 || layer_of(y, &y_before, &y_after) < 0) return 0;
    return x_before == y_before && memcmp(x, y, x_before) == 0 && strcmp(x_after, y_after) == 0 &&
           same_member(a, b, "dtype") && same_member(a, b, "shape") &&
           same_member(a, b, "scheme") && same_member(a, b, "bytes");
}

/* One line of the table: a tensor, or the same tensor of several layers. */
typedef struct tensor_group {
    const json_t *first;
    long first_layer, last_layer; /* -1: no layers */
    uint64_t nonfinite, zero_rows;
    double absmax;
    double squares; /* of the tensors' own root mean squares; they have one shape */
    long n_deep;
    int deep;
} tensor_group;

static void add_to_group(tensor_group *g, const json_t *tensor)
{
    const json_t *deep = json_object_get(tensor, "deep");
    double absmax = real_of(deep, "absmax");
    if (!json_is_object(deep)) return;
    g->deep = 1;
    g->nonfinite += uint_of(deep, "nonfinite");
    g->zero_rows += uint_of(deep, "zero_rows");
    if (absmax > g->absmax) g->absmax = absmax;
    g->squares += real_of(deep, "rms") * real_of(deep, "rms");
    g->n_deep++;
}

/* The group that begins at `row`; its other members are marked in `shown`. Only a run of layers
 * without a gap is a group, because it is written as a range. */
static void find_group(const json_t *tensors, size_t row, unsigned char *shown, tensor_group *g)
{
    const char *after;
    size_t before, i;
    memset(g, 0, sizeof *g);
    g->first = json_array_get(tensors, row);
    g->first_layer = g->last_layer = layer_of(text_of(g->first, "name"), &before, &after);
    add_to_group(g, g->first);
    for (i = row + 1; g->first_layer >= 0 && i < json_array_size(tensors); i++) {
        const json_t *other = json_array_get(tensors, i);
        if (shown[i] || !same_but_layer(g->first, other)) continue;
        if (layer_of(text_of(other, "name"), &before, &after) != g->last_layer + 1) continue;
        shown[i] = 1;
        g->last_layer++;
        add_to_group(g, other);
    }
}

static void cell_shape(out_table *t, const json_t *shape)
{
    char text[200] = "";
    size_t i, used = 0;
    for (i = 0; i < json_array_size(shape) && used < sizeof text; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%" JSON_INTEGER_FORMAT,
                                 i ? ", " : "", json_integer_value(json_array_get(shape, i)));
    out_table_cell(t, "[%s]", text);
}

static void cell_group(out_table *t, const tensor_group *g, int deep)
{
    const char *name = text_of(g->first, "name"), *after = "";
    const char *shared = text_of(json_object_get(g->first, "shared_with"), "target");
    const json_t *target = json_object_get(g->first, "target");
    size_t before = 0;
    char text[32];
    long n = g->last_layer - g->first_layer + 1;
    if (n > 1) {
        layer_of(name, &before, &after);
        out_table_cell(t, "%.*s{%ld-%ld}%s", (int)before, name, g->first_layer, g->last_layer,
                       after);
    } else {
        out_table_cell(t, "%s", name);
    }
    out_table_cell(t, "%s", text_of(g->first, "dtype"));
    cell_shape(t, json_object_get(g->first, "shape"));
    out_table_cell(t, "%s", out_bytes(text, (double)uint_of(g->first, "bytes") * (double)n));
    if (*shared) /* the same bytes serve a second place */
        out_table_cell(t, "also %s", shared);
    else
        out_table_cell(t, "%s", json_is_string(target) ? "" : "foreign");
    if (!deep) return;
    out_table_cell(t, g->deep ? "%" PRIu64 : "", g->nonfinite);
    out_table_cell(t, g->deep ? "%" PRIu64 : "", g->zero_rows);
    out_table_cell(t, g->deep ? "%.4g" : "", g->absmax);
    out_table_cell(t, g->deep ? "%.4g" : "",
                   g->n_deep ? sqrt(g->squares / (double)g->n_deep) : 0.0);
}

static int print_tensors(const json_t *doc)
{
    const json_t *tensors = json_object_get(doc, "tensors");
    const json_t *totals = json_object_get(doc, "totals"), *want = json_object_get(doc, "expected");
    const json_t *parameters = json_object_get(totals, "parameters");
    const json_t *stored = json_object_get(totals, "stored_elements");
    int deep = json_is_object(json_object_get(doc, "deep")), failed;
    size_t n = json_array_size(tensors), i;
    unsigned char *shown;
    out_table t;
    if (!n) return 0;
    shown = calloc(n, 1);
    if (!shown) return -1;
    begin_line("tensors");
    put_count("", uint_of(totals, "tensors"), "");
    if (json_is_integer(parameters)) put_count(", ", uint_of(totals, "parameters"), " parameters");
    if (!json_equal(parameters, stored))
        put_count(", ", uint_of(totals, "stored_elements"), " stored elements");
    put_bytes(", ", uint_of(totals, "bytes"), "");
    if (json_is_object(want)) {
        put_count("; the config's roster has ", uint_of(want, "tensors"), "");
        printf(" (optional ones included)");
    }
    putchar('\n');
    out_table_init(&t, deep ? "lllrlrrrr" : "lllrl");
    out_table_cell(&t, "name");
    out_table_cell(&t, "dtype");
    out_table_cell(&t, "shape");
    out_table_cell(&t, "bytes");
    out_table_cell(&t, "%s", "");
    if (deep) {
        out_table_cell(&t, "not finite");
        out_table_cell(&t, "zero rows");
        out_table_cell(&t, "largest");
        out_table_cell(&t, "rms");
    }
    for (i = 0; i < n; i++) {
        tensor_group g;
        if (shown[i]) continue;
        find_group(tensors, i, shown, &g);
        cell_group(&t, &g, deep);
    }
    failed = out_table_print(&t, 2);
    free(shown);
    return failed;
}

/* ---- memory, problems ---- */

/* Of the draft's own linear `name`; what it borrows is BF16 here. */
static const char *scheme_of(const json_t *doc, const char *name)
{
    const json_t *list = json_object_get(json_object_get(doc, "quantisation"), "linears");
    size_t i;
    for (i = 0; i < json_array_size(list); i++)
        if (strcmp(text_of(json_array_get(list, i), "name"), name) == 0)
            return text_of(json_array_get(list, i), "scheme");
    return "bf16";
}

static void print_plan(const json_t *doc)
{
    const json_t *plan = json_object_get(doc, "plan");
    const json_t *read = json_object_get(plan, "read_bytes");
    const json_t *resident = json_object_get(plan, "resident_bytes");
    const json_t *cache = json_object_get(plan, "cache_bytes_per_token");
    const json_t *workspace = json_object_get(plan, "workspace");
    const char *key;
    json_t *value;
    size_t i;
    if (!json_is_object(plan)) return;
    begin_line("memory");
    put_bytes("context KV reads ", uint_of(read, "total"), " of the files and keeps ");
    put_bytes("", uint_of(resident, "total"), " of packed weights\n");
    begin_line("");
    put_bytes("  context_proj ", uint_of(resident, "context_proj"), "");
    put_bytes(", context_kv ", uint_of(resident, "context_kv"), "");
    put_bytes(", norms ", uint_of(resident, "norms"), "");
    put_bytes("; the full path adds q_a ", uint_of(resident, "q_a"), "\n");
    if (json_is_integer(json_object_get(resident, "block"))) {
        begin_line("");
        put_bytes("  drafting adds q_a, layers and heads ", uint_of(resident, "block"), "");
        put_bytes(", lm_head ", uint_of(resident, "lm_head"), "");
        printf(" as %s\n", scheme_of(doc, "lm_head"));
    }
    begin_line("");
    printf("cache per position, all layers:");
    i = 0;
    json_object_foreach((json_t *)cache, key, value)
        if (json_is_integer(value))
            printf("%s %s %" JSON_INTEGER_FORMAT, i++ ? "," : "", key, json_integer_value(value));
    printf(" bytes\n");
    for (i = 0; i < json_array_size(workspace); i++) {
        const json_t *w = json_array_get(workspace, i);
        begin_line("");
        put_bytes("workspace ", uint_of(w, "bytes"), " for ");
        put_count("", uint_of(w, "max_tokens"), " rows a chunk and ");
        put_count("", uint_of(w, "n_threads"), uint_of(w, "n_threads") == 1 ? " thread\n"
                                                                            : " threads\n");
    }
}

/* ---- linears ---- */

/* "layers.3.mlp.up_proj" -> "up_proj"; names outside layers stay whole. */
static const char *short_name(const json_t *linear)
{
    const char *name = text_of(linear, "name"), *after, *dot;
    size_t before;
    if (layer_of(name, &before, &after) < 0) return name;
    dot = strrchr(name, '.');
    return dot ? dot + 1 : name;
}

/* Does an earlier linear have the same scheme (and, with `name`, the same short name)? */
static int seen_before(const json_t *linears, size_t row, int name)
{
    const json_t *linear = json_array_get(linears, row);
    size_t i;
    for (i = 0; i < row; i++) {
        const json_t *other = json_array_get(linears, i);
        if (strcmp(text_of(other, "scheme"), text_of(linear, "scheme")) != 0) continue;
        if (!name || strcmp(short_name(other), short_name(linear)) == 0) return 1;
    }
    return 0;
}

/* Linears from `row` on with its scheme and its short name. */
static size_t count_alike(const json_t *linears, size_t row)
{
    const json_t *linear = json_array_get(linears, row);
    size_t i, n = 0;
    for (i = row; i < json_array_size(linears); i++) {
        const json_t *other = json_array_get(linears, i);
        n += strcmp(text_of(other, "scheme"), text_of(linear, "scheme")) == 0 &&
             strcmp(short_name(other), short_name(linear)) == 0;
    }
    return n;
}

/* Is a linear one of the shards, which are named with a space around each? */
static int is_shard(const json_t *linear, const char *shards)
{
    char name[80];
    snprintf(name, sizeof name, " %s ", short_name(linear));
    return strstr(shards, name) != NULL;
}

/* Linears that lie in one matrix of the model: shards of each scheme, and what the whole takes. */
static int print_merged(const json_t *linears, const char *label, const char *what,
                        const char *shards)
{
    uint64_t n_bytes = 0;
    size_t n = json_array_size(linears), n_shards = 0, i, j;
    for (i = 0; i < n; i++) {
        const json_t *linear = json_array_get(linears, i);
        if (!is_shard(linear, shards)) continue;
        n_shards++;
        n_bytes += uint_of(linear, "packed_bytes");
    }
    if (!n_shards) return 0;
    begin_line(label);
    printf("%s: %zu shard%s", what, n_shards, n_shards == 1 ? "" : "s");
    for (i = 0; i < n; i++) {
        const json_t *linear = json_array_get(linears, i);
        const char *scheme = text_of(linear, "scheme");
        size_t before = 0, times = 0;
        if (!is_shard(linear, shards)) continue;
        for (j = 0; j < n; j++) {
            const json_t *other = json_array_get(linears, j);
            if (!is_shard(other, shards) || strcmp(text_of(other, "scheme"), scheme)) continue;
            before += j < i;
            times++;
        }
        if (!before) printf(", %s in %zu", scheme, times);
    }
    put_bytes(", ", n_bytes, " packed\n");
    return 1;
}

/* What context KV runs over all layers at once, then what drafting does. */
static void print_all_merged(const json_t *linears)
{
    static const char *const merged[][2] = {{"context_kv", " kv_a_proj_with_mqa "},
                                            {"q_a", " q_a_proj "},
                                            {"q_b", " q_b_proj "},
                                            {"o", " o_proj "},
                                            {"gate_up", " gate_proj up_proj "},
                                            {"down", " down_proj "}};
    size_t i;
    int n_lines = 0;
    for (i = 0; i < sizeof merged / sizeof *merged; i++)
        n_lines += print_merged(linears, n_lines ? "" : "merged", merged[i][0], merged[i][1]);
}

/* A line for each scheme: what is in it, by its short name with a count, or by its full name. */
static void print_linears(const json_t *linears)
{
    size_t n = json_array_size(linears), i, j;
    int n_lines = 0;
    print_all_merged(linears);
    for (i = 0; i < n; i++) {
        uint64_t n_bytes = 0;
        const char *scheme = text_of(json_array_get(linears, i), "scheme");
        if (seen_before(linears, i, 0)) continue;
        begin_line(n_lines++ ? "" : "linears");
        printf("%s:", scheme);
        for (j = i; j < n; j++) {
            const json_t *linear = json_array_get(linears, j);
            size_t times;
            if (strcmp(text_of(linear, "scheme"), scheme) != 0) continue;
            n_bytes += uint_of(linear, "packed_bytes");
            if (seen_before(linears, j, 1)) continue;
            times = count_alike(linears, j);
            printf("%s ", j == i ? "" : ",");
            out_text(stdout, times > 1 ? short_name(linear) : text_of(linear, "name"));
            if (times > 1) printf(" x %zu", times);
        }
        put_bytes("; ", n_bytes, " packed\n");
    }
}

static void print_quantisation(const json_t *doc)
{
    const json_t *quant = json_object_get(doc, "quantisation");
    const json_t *schemes = json_object_get(quant, "schemes");
    const char *key;
    json_t *value;
    int n = 0;
    if (!*text_of(quant, "config_method") && json_object_size(schemes) == 0) return;
    begin_line("weights");
    json_object_foreach((json_t *)schemes, key, value) {
        printf("%s", n++ ? ", " : "");
        out_text(stdout, key);
        printf(" in %" JSON_INTEGER_FORMAT " module%s", json_integer_value(value),
               json_integer_value(value) == 1 ? "" : "s");
    }
    if (*text_of(quant, "config_method")) {
        printf("%sconfig says ", n ? "; " : "");
        out_text(stdout, text_of(quant, "config_method"));
    }
    putchar('\n');
    if (*text_of(quant, "config")) {
        begin_line("");
        printf("quantization_config: ");
        out_text(stdout, text_of(quant, "config"));
        putchar('\n');
    }
    print_linears(json_object_get(quant, "linears"));
}

static void print_problems(const json_t *doc)
{
    const json_t *problems = json_object_get(doc, "problems");
    size_t n = json_array_size(problems), i;
    uint64_t more = uint_of(doc, "problems_left_out");
    for (i = 0; i < n && i < SHOWN_PROBLEMS; i++) {
        const json_t *p = json_array_get(problems, i);
        begin_line(i ? "" : "problems");
        printf("- ");
        if (*text_of(p, "tensor")) {
            out_text(stdout, text_of(p, "tensor"));
            printf(": ");
        }
        out_text(stdout, text_of(p, "text"));
        printf(" (%s)\n", text_of(p, "status"));
    }
    more += n - i;
    if (!more) return;
    begin_line("");
    put_count("and ", more, " more (--json lists them)\n");
}

int inspect_print(const json_t *doc)
{
    const json_t *deep = json_object_get(doc, "deep");
    print_family(doc);
    print_config(doc);
    print_quantisation(doc);
    print_sentences("assumed", json_object_get(doc, "notes"));
    if (print_tensors(doc) != 0) return out_error(EXIT_INTERNAL, "out of memory");
    print_plan(doc);
    if (*text_of(doc, "fingerprint")) {
        begin_line("headers");
        printf("fingerprint %s\n", text_of(doc, "fingerprint"));
    }
    if (json_is_object(deep)) {
        begin_line("deep");
        put_bytes("", uint_of(deep, "bytes"), " read");
        put_count(", ", uint_of(deep, "nonfinite"),
                  uint_of(deep, "nonfinite") == 1 ? " value not finite" : " values not finite");
        put_count(", ", uint_of(deep, "zero_rows"),
                  uint_of(deep, "zero_rows") == 1 ? " row of zeros\n" : " rows of zeros\n");
    }
    print_sentences("warnings", json_object_get(doc, "warnings"));
    print_problems(doc);
    return EXIT_OK;
}
