/* dspark compare A B: are two files of latent caches equal, and where do they begin to differ? The
 * form is that of `dspark context --out`; an engine's own cache, dumped in that form, is taken too.
 * Entries are paired by position through slot_mapping, so that block tables and block sizes do not
 * matter. Knows no model and computes no cache. */
#include "compare_files.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "compare_values.h"
#include "dspark/dspark.h"
#include "out.h"

typedef enum cache_kind { KIND_BF16, KIND_FP8, KIND_DS_MLA } cache_kind;

/* One row of slot_mapping. */
typedef struct mapped_row {
    int64_t position;
    uint64_t slot;
    uint64_t row;
} mapped_row;

typedef struct cache_file {
    const char *path;
    dspark_checkpoint *file;
    const dspark_tensor *layers[DSPARK_MAX_LAYERS];
    uint32_t n_layers;
    cache_kind kind;
    value_form form;          /* of an element of the latent; KIND_FP8: of all */
    double scales[DSPARK_MAX_LAYERS]; /* KIND_FP8; 0: the file does not say */
    uint64_t n_blocks, block_size;
    uint64_t entry_bytes;
    uint64_t latent;          /* elements of the latent by the metadata, 0 unknown */
    int has_mapping;
    int has_positions;
    mapped_row *rows;         /* [n_rows], by position */
    uint64_t n_rows;
} cache_file;

/* Elements of one kind within an entry. */
typedef struct entry_part {
    const char *name, *key, *unit;
    size_t at;                /* bytes */
    size_t n, width;          /* elements, bytes of one */
} entry_part;

#define MAX_PARTS 3

typedef struct part_result {
    uint64_t n_differ;
    int64_t first;            /* position or slot */
    size_t first_element;
    uint64_t max_difference;  /* in units of the part */
    value_error error;
} part_result;

#define MAX_METADATA (8 + 2 * DSPARK_MAX_LAYERS)

typedef struct files_job {
    cache_file a, b;
    entry_part parts[MAX_PARTS];
    size_t n_parts;
    part_result results[DSPARK_MAX_LAYERS][MAX_PARTS];
    value_tables tables;
    int by_position;
    uint64_t n_compared, only_a, only_b;
    char keys[MAX_METADATA][64]; /* metadata that differs */
    size_t n_keys;
    int scales_differ;        /* equal codes are then not equal values */
    uint64_t n_differ, n_not_finite;
} files_job;

/* ---- reading --------------------------------------------------------------------------------- */

static dspark_status refuse(const cache_file *f, const char *tensor, dspark_error *err,
                            const char *text)
{
    char where[256];
    snprintf(where, sizeof where, "%.150s: %.80s", f->path, tensor);
    return out_set_error(err, DSPARK_EFORMAT, where, "%s", text);
}

static dspark_status find_kind(cache_file *f, const dspark_tensor *t, dspark_error *err)
{
    const char *dtype = dspark_checkpoint_metadata(f->file, "cache_dtype");
    uint64_t width = t->shape[2];
    f->entry_bytes = t->dtype == DSPARK_BF16 ? 2 * width : width;
    f->form = VALUE_E4M3;
    if (t->dtype == DSPARK_F8_E5M2 || (dtype && strcmp(dtype, "fp8_e5m2") == 0))
        f->form = VALUE_E5M2;
    if (t->dtype == DSPARK_BF16)
        f->kind = KIND_BF16;
    else if (t->dtype == DSPARK_F8_E4M3 || t->dtype == DSPARK_F8_E5M2)
        f->kind = KIND_FP8;
    else if (t->dtype == DSPARK_U8 && dtype && strncmp(dtype, "fp8_e", 5) == 0)
        f->kind = KIND_FP8;
    else if (t->dtype == DSPARK_U8 && width == 656)
        f->kind = KIND_DS_MLA;
    else
        return refuse(f, t->name, err, "expected BF16, F8_E4M3, F8_E5M2, or U8 with 656 a row");
    return DSPARK_OK;
}

static dspark_status find_layers(cache_file *f, dspark_error *err)
{
    const dspark_tensor *first = NULL;
    for (;;) {
        char name[64];
        const dspark_tensor *t;
        snprintf(name, sizeof name, "layers.%u.kv_cache", f->n_layers);
        t = dspark_checkpoint_find(f->file, name);
        if (!t && f->n_layers) return DSPARK_OK;
        if (!t)
            return refuse(f, name, err, "no such tensor: this is no file of caches, such as "
                          "'dspark context --out' writes");
        if (f->n_layers == DSPARK_MAX_LAYERS) return refuse(f, name, err, "too many layers");
        if (t->rank != 3 || t->n_elements == 0)
            return refuse(f, name, err, "expected [blocks, block size, entry], not empty");
        if (!first) {
            dspark_status st = find_kind(f, t, err);
            if (st != DSPARK_OK) return st;
            first = t;
            f->n_blocks = t->shape[0];
            f->block_size = t->shape[1];
        }
        if (t->dtype != first->dtype || memcmp(t->shape, first->shape, 3 * sizeof *t->shape) != 0)
            return refuse(f, name, err, "another dtype or shape than layer 0");
        f->layers[f->n_layers++] = t;
    }
}

/* Of plain fp8, where a value is code times scale. */
static dspark_status read_scales(cache_file *f, dspark_error *err)
{
    uint32_t l;
    for (l = 0; l < f->n_layers; l++) {
        char key[64], *end;
        const char *text;
        snprintf(key, sizeof key, "scale.layers.%u", l);
        text = dspark_checkpoint_metadata(f->file, key);
        if (f->kind != KIND_FP8 || !text) continue;
        f->scales[l] = strtod(text, &end);
        if (!*text || *end || !isfinite(f->scales[l]) || !(f->scales[l] > 0))
            return refuse(f, key, err, "expected a number greater than 0 in the metadata");
    }
    return DSPARK_OK;
}

static int64_t integer_at(const dspark_tensor *t, uint64_t i)
{
    int64_t wide;
    int32_t narrow;
    if (t->dtype == DSPARK_I64) {
        memcpy(&wide, (const unsigned char *)t->data + 8 * i, sizeof wide);
        return wide;
    }
    memcpy(&narrow, (const unsigned char *)t->data + 4 * i, sizeof narrow);
    return narrow;
}

static int is_integers(const dspark_tensor *t)
{
    return t->rank == 1 && (t->dtype == DSPARK_I64 || t->dtype == DSPARK_I32);
}

static int by_position(const void *a, const void *b)
{
    const mapped_row *x = a, *y = b;
    if (x->position != y->position) return x->position < y->position ? -1 : 1;
    return x->row < y->row ? -1 : x->row > y->row;
}

static dspark_status read_mapping(cache_file *f, dspark_error *err)
{
    const dspark_tensor *slots = dspark_checkpoint_find(f->file, "slot_mapping");
    const dspark_tensor *positions = dspark_checkpoint_find(f->file, "positions");
    uint64_t i, n;
    if (!slots) return DSPARK_OK;
    if (!is_integers(slots)) return refuse(f, "slot_mapping", err, "expected [n] I64");
    n = slots->shape[0];
    if (positions && (!is_integers(positions) || positions->shape[0] != n))
        return refuse(f, "positions", err, "expected one I64 for each row of slot_mapping");
    if (n >= SIZE_MAX / sizeof *f->rows || !(f->rows = calloc((size_t)n + 1, sizeof *f->rows)))
        return out_set_error(err, DSPARK_ENOMEM, "", "out of memory for %" PRIu64 " rows", n);
    for (i = 0; i < n; i++) {
        int64_t slot = integer_at(slots, i);
        mapped_row *row = &f->rows[f->n_rows];
        char text[128];
        if (slot < 0) continue; /* not in the cache */
        if ((uint64_t)slot / f->block_size >= f->n_blocks) {
            snprintf(text, sizeof text, "row %" PRIu64 ": slot %" PRId64 ", and there are %" PRIu64
                     " blocks of %" PRIu64, i, slot, f->n_blocks, f->block_size);
            return refuse(f, "slot_mapping", err, text);
        }
        row->position = positions ? integer_at(positions, i) : (int64_t)i;
        row->slot = (uint64_t)slot;
        row->row = i;
        f->n_rows++;
    }
    qsort(f->rows, (size_t)f->n_rows, sizeof *f->rows, by_position);
    f->has_mapping = 1;
    f->has_positions = positions != NULL;
    return DSPARK_OK;
}

static dspark_status open_file(cache_file *f, const char *path, dspark_error *err)
{
    const char *latent;
    dspark_status st;
    f->path = path;
    st = dspark_checkpoint_open(&f->file, path, err);
    if (st != DSPARK_OK) {
        out_add_file(err, path);
        return st;
    }
    if ((st = find_layers(f, err)) != DSPARK_OK) return st;
    if ((st = read_scales(f, err)) != DSPARK_OK) return st;
    latent = dspark_checkpoint_metadata(f->file, "kv_lora_rank");
    if (latent) f->latent = strtoull(latent, NULL, 10);
    return read_mapping(f, err);
}

/* ---- can they be compared? ------------------------------------------------------------------- */

static void add_part(files_job *job, const char *name, const char *key, const char *unit,
                     size_t n, size_t width)
{
    const entry_part *last = job->n_parts ? &job->parts[job->n_parts - 1] : NULL;
    entry_part *p = &job->parts[job->n_parts++];
    p->name = name;
    p->key = key;
    p->unit = unit;
    p->at = last ? last->at + last->n * last->width : 0;
    p->n = n;
    p->width = width;
}

/* A file without kv_lora_rank is split where K3's entries are; other widths stay in one piece. */
static void find_parts(files_job *job)
{
    size_t width = job->a.kind == KIND_BF16 ? 2 : 1, n = (size_t)job->a.entry_bytes / width;
    uint64_t latent = job->a.latent ? job->a.latent : job->b.latent;
    const char *unit = job->a.kind == KIND_BF16 ? "ulp" : "codes";
    if (job->a.kind == KIND_DS_MLA) {
        add_part(job, "latent", "latent", "codes", 512, 1);
        add_part(job, "tile scales", "tile_scales", "fp32 ulp", 4, 4);
        add_part(job, "rope key", "rope_key", "ulp", 64, 2);
        return;
    }
    if (!latent && n == 576) latent = 512;
    if (latent == 0 || latent >= n) {
        add_part(job, "entry", "entry", unit, n, width);
        return;
    }
    add_part(job, "latent", "latent", unit, (size_t)latent, width);
    add_part(job, "rope key", "rope_key", unit, n - (size_t)latent, width);
}

static dspark_status match_files(files_job *job, dspark_error *err)
{
    const cache_file *a = &job->a, *b = &job->b;
    char text[200];
    if (a->n_layers != b->n_layers) {
        snprintf(text, sizeof text, "%u layers, and the other file has %u", b->n_layers,
                 a->n_layers);
        return refuse(b, "layers", err, text);
    }
    if (a->kind != b->kind || a->entry_bytes != b->entry_bytes ||
        (a->layers[0]->dtype != b->layers[0]->dtype && a->layers[0]->dtype != DSPARK_U8 &&
         b->layers[0]->dtype != DSPARK_U8)) {
        snprintf(text, sizeof text, "entries of %" PRIu64 " bytes, %s; the other file has %" PRIu64
                 " bytes, %s: different formats cannot be compared", b->entry_bytes,
                 dspark_dtype_name(b->layers[0]->dtype), a->entry_bytes,
                 dspark_dtype_name(a->layers[0]->dtype));
        return refuse(b, b->layers[0]->name, err, text);
    }
    job->by_position = a->has_mapping && b->has_mapping;
    if (job->by_position || a->block_size == b->block_size) return DSPARK_OK;
    snprintf(text, sizeof text, "block sizes %" PRIu64 " and %" PRIu64 " can only be compared when "
             "both files have a slot_mapping", a->block_size, b->block_size);
    return refuse(a->has_mapping ? b : a, "slot_mapping", err, text);
}

/* ---- comparing ------------------------------------------------------------------------------- */

/* Numbers in the order of their values: neighbours differ by 1; both zeros are 0. */
static int64_t order_of(const unsigned char *p, size_t width)
{
    uint32_t bits = 0, sign;
    if (width == 1) {
        bits = *p;
    } else if (width == 2) {
        uint16_t half;
        memcpy(&half, p, sizeof half);
        bits = half;
    } else {
        memcpy(&bits, p, sizeof bits);
    }
    sign = UINT32_C(1) << (8 * width - 1);
    return bits & sign ? -(int64_t)(bits & (sign - 1)) : (int64_t)bits;
}

static void compare_part(const entry_part *part, part_result *r, const unsigned char *x,
                         const unsigned char *y, int64_t where)
{
    size_t i;
    x += part->at;
    y += part->at;
    if (memcmp(x, y, part->n * part->width) == 0) return;
    for (i = 0; i < part->n; i++, x += part->width, y += part->width) {
        int64_t difference;
        if (memcmp(x, y, part->width) == 0) continue;
        difference = order_of(x, part->width) - order_of(y, part->width);
        if (difference < 0) difference = -difference;
        if (r->n_differ++ == 0) {
            r->first = where;
            r->first_element = i;
        }
        if ((uint64_t)difference > r->max_difference) r->max_difference = (uint64_t)difference;
    }
}

/* The tiles of a DS-MLA entry have their scales behind the 512 codes. */
static void measure_tiles(files_job *job, part_result *r, const unsigned char *x,
                          const unsigned char *y)
{
    size_t tile;
    for (tile = 0; tile < 4; tile++) {
        float scale_x, scale_y;
        memcpy(&scale_x, x + 512 + 4 * tile, sizeof scale_x);
        memcpy(&scale_y, y + 512 + 4 * tile, sizeof scale_y);
        value_error_add(&r->error, &job->tables,
                        (value_view){x + 128 * tile, VALUE_E4M3, (double)scale_x},
                        (value_view){y + 128 * tile, VALUE_E4M3, (double)scale_y}, 128);
    }
}

static void measure_part(files_job *job, size_t p, uint32_t layer, const unsigned char *x,
                         const unsigned char *y)
{
    static const value_form forms[] = {VALUE_E4M3, VALUE_F32, VALUE_BF16};
    const entry_part *part = &job->parts[p];
    part_result *r = &job->results[layer][p];
    value_view a = {x + part->at, VALUE_BF16, 1}, b = {y + part->at, VALUE_BF16, 1};
    if (job->a.kind == KIND_DS_MLA && p == 0) {
        measure_tiles(job, r, x, y);
        return;
    }
    if (job->a.kind == KIND_DS_MLA) {
        a.form = b.form = forms[p];
    } else if (job->a.kind == KIND_FP8) {
        const double scale_a = job->a.scales[layer], scale_b = job->b.scales[layer];
        a.form = job->a.form;
        b.form = job->b.form;
        /* An engine that says nothing: as the other file. */
        a.scale = scale_a > 0 ? scale_a : scale_b > 0 ? scale_b : 1;
        b.scale = scale_b > 0 ? scale_b : a.scale;
    }
    value_error_add(&r->error, &job->tables, a, b, part->n);
}

static void compare_entry(files_job *job, uint64_t slot_a, uint64_t slot_b, int64_t where)
{
    uint32_t l;
    size_t p;
    for (l = 0; l < job->a.n_layers; l++) {
        const unsigned char *x =
            (const unsigned char *)job->a.layers[l]->data + (size_t)(slot_a * job->a.entry_bytes);
        const unsigned char *y =
            (const unsigned char *)job->b.layers[l]->data + (size_t)(slot_b * job->a.entry_bytes);
        for (p = 0; p < job->n_parts; p++) {
            compare_part(&job->parts[p], &job->results[l][p], x, y, where);
            measure_part(job, p, l, x, y);
        }
    }
    job->n_compared++;
}

static dspark_status compare_rows(files_job *job, dspark_error *err)
{
    const cache_file *a = &job->a, *b = &job->b;
    uint64_t i = 0, k = 0;
    while (i < a->n_rows && k < b->n_rows) {
        if (a->rows[i].position < b->rows[k].position) {
            job->only_a++, i++;
        } else if (a->rows[i].position > b->rows[k].position) {
            job->only_b++, k++;
        } else {
            compare_entry(job, a->rows[i].slot, b->rows[k].slot, a->rows[i].position);
            i++, k++;
        }
        if (((i + k) & 1023) == 0 && out_interrupted()) return out_check_interrupt(err);
    }
    job->only_a += a->n_rows - i;
    job->only_b += b->n_rows - k;
    return DSPARK_OK;
}

static dspark_status compare_slots(files_job *job, dspark_error *err)
{
    uint64_t n_a = job->a.n_blocks * job->a.block_size, n_b = job->b.n_blocks * job->b.block_size;
    uint64_t n = n_a < n_b ? n_a : n_b, i;
    for (i = 0; i < n; i++) {
        compare_entry(job, i, i, (int64_t)i);
        if ((i & 1023) == 0 && out_interrupted()) return out_check_interrupt(err);
    }
    job->only_a = n_a - n;
    job->only_b = n_b - n;
    return DSPARK_OK;
}

/* ---- metadata -------------------------------------------------------------------------------- */

static void compare_key(files_job *job, const char *key, int is_scale)
{
    const char *x = dspark_checkpoint_metadata(job->a.file, key);
    const char *y = dspark_checkpoint_metadata(job->b.file, key);
    if ((!x && !y) || (x && y && strcmp(x, y) == 0) || job->n_keys == MAX_METADATA) return;
    snprintf(job->keys[job->n_keys++], sizeof job->keys[0], "%s", key);
    if (is_scale && x && y) job->scales_differ = 1;
}

static void compare_metadata(files_job *job)
{
    char key[64];
    uint32_t l;
    compare_key(job, "fingerprint", 0);
    compare_key(job, "cache_dtype", 1);
    compare_key(job, "kv_lora_rank", 0);
    compare_key(job, "tile_scale", 0); /* how scales were made: what they are is in the entries */
    for (l = 0; l < job->a.n_layers; l++) {
        snprintf(key, sizeof key, "scale.layers.%u", l);
        compare_key(job, key, 1);
    }
    compare_key(job, "digest.taps", 0);
    compare_key(job, "digest.states", 0);
    compare_key(job, "dspark_version", 0);
}

/* ---- the report ------------------------------------------------------------------------------ */

static void print_file(const char *label, const cache_file *f)
{
    char text[32];
    printf("%-12s", label);
    out_text(stdout, f->path);
    printf("\n            %u layers x %" PRIu64 " blocks x %" PRIu64 " entries of %" PRIu64
           " bytes%s", f->n_layers, f->n_blocks, f->block_size, f->entry_bytes,
           f->has_mapping ? "; " : "; no slot_mapping\n");
    if (f->has_mapping)
        printf("%s rows%s\n", out_count(text, f->n_rows),
               f->has_positions ? "" : " (no positions: rows are counted)");
}

static void cell_number(out_table *t, double x)
{
    if (isfinite(x))
        out_table_cell(t, "%.3g", x);
    else
        out_table_cell(t, "-");
}

static void cell_part(out_table *t, const files_job *job, uint32_t layer, size_t p)
{
    const part_result *r = &job->results[layer][p];
    out_table_cell(t, "%u", layer);
    out_table_cell(t, "%s", job->parts[p].name);
    if (r->n_differ) {
        out_table_cell(t, "%" PRIu64 " DIFFER", r->n_differ);
        out_table_cell(t, "%s %" PRId64 ", element %zu", job->by_position ? "position" : "slot",
                       r->first, r->first_element);
        out_table_cell(t, "%" PRIu64 " %s", r->max_difference, job->parts[p].unit);
    } else {
        out_table_cell(t, job->n_compared ? "equal" : "none in common");
        out_table_cell(t, "%s", "");
        out_table_cell(t, "%s", "");
    }
    if (r->n_differ || r->error.max_abs > 0) {
        cell_number(t, r->error.n ? r->error.max_abs : (double)NAN);
        cell_number(t, value_error_rms(&r->error));
        cell_number(t, value_error_relative(&r->error));
    } else {
        out_table_cell(t, "%s", "");
        out_table_cell(t, "%s", "");
        out_table_cell(t, "%s", "");
    }
    if (!job->n_not_finite) return;
    out_table_cell(t, r->error.n_not_finite ? "%" PRIu64 : "", r->error.n_not_finite);
}

static int print_parts(const files_job *job)
{
    out_table t;
    uint32_t l;
    size_t p;
    out_table_init(&t, job->n_not_finite ? "lllllrrrr" : "lllllrrr");
    out_table_cell(&t, "layer");
    out_table_cell(&t, "part");
    out_table_cell(&t, "elements");
    out_table_cell(&t, "first at");
    out_table_cell(&t, "largest");
    out_table_cell(&t, "max abs");
    out_table_cell(&t, "rms");
    out_table_cell(&t, "relative");
    if (job->n_not_finite) out_table_cell(&t, "not finite");
    for (l = 0; l < job->a.n_layers; l++)
        for (p = 0; p < job->n_parts; p++) cell_part(&t, job, l, p);
    return out_table_print(&t, 2) == 0 ? EXIT_OK : out_error(EXIT_INTERNAL, "out of memory");
}

static int print_text(const files_job *job)
{
    const char *place = job->by_position ? "position" : "slot";
    char text[32];
    size_t i;
    int code;
    print_file("A", &job->a);
    print_file("B", &job->b);
    printf("compared    %s entries a layer, by %s\n", out_count(text, job->n_compared), place);
    if (job->only_a) printf("            %s only in A\n", out_count(text, job->only_a));
    if (job->only_b) printf("            %s only in B\n", out_count(text, job->only_b));
    putchar('\n');
    if ((code = print_parts(job)) != EXIT_OK) return code;
    for (i = 0; i < job->n_keys; i++) {
        const char *x = dspark_checkpoint_metadata(job->a.file, job->keys[i]);
        const char *y = dspark_checkpoint_metadata(job->b.file, job->keys[i]);
        printf("%s%s: A ", i ? "            " : "\nmetadata    ", job->keys[i]);
        out_text(stdout, x ? x : "absent");
        printf(", B ");
        out_text(stdout, y ? y : "absent");
        putchar('\n');
    }
    if (job->n_differ)
        printf("\nNOT EQUAL: %" PRIu64 " elements differ\n", job->n_differ);
    else if (!job->n_compared)
        printf("\nNOT EQUAL: no %s is in both\n", place);
    else if (job->only_a || job->only_b)
        printf("\nNOT EQUAL: what both have is equal, and one has more\n");
    else if (job->scales_differ)
        printf("\nNOT EQUAL: the codes are equal, and their scales are not\n");
    else
        printf("\nequal: %s entries in each of %u layer%s\n", out_count(text, job->n_compared),
               job->a.n_layers, job->a.n_layers == 1 ? "" : "s");
    return EXIT_OK;
}

static int print_json(const files_job *job, int equal)
{
    json_t *doc = json_object(), *layers = json_array(), *metadata = json_array();
    uint32_t l;
    size_t p, i;
    out_set(doc, "a", out_string(job->a.path));
    out_set(doc, "b", out_string(job->b.path));
    out_set(doc, "equal", json_boolean(equal));
    out_set(doc, "by", json_string(job->by_position ? "position" : "slot"));
    out_set(doc, "entries", json_integer((json_int_t)job->n_compared));
    out_set(doc, "only_a", json_integer((json_int_t)job->only_a));
    out_set(doc, "only_b", json_integer((json_int_t)job->only_b));
    out_set(doc, "elements_different", json_integer((json_int_t)job->n_differ));
    for (l = 0; l < job->a.n_layers; l++) {
        for (p = 0; p < job->n_parts; p++) {
            const part_result *r = &job->results[l][p];
            json_t *item = json_object();
            out_set(item, "layer", json_integer(l));
            out_set(item, "part", json_string(job->parts[p].key));
            out_set(item, "elements_different", json_integer((json_int_t)r->n_differ));
            out_set(item, "first", r->n_differ ? json_integer(r->first) : json_null());
            out_set(item, "first_element",
                    r->n_differ ? json_integer((json_int_t)r->first_element) : json_null());
            out_set(item, "max_difference", json_integer((json_int_t)r->max_difference));
            out_set(item, "unit", json_string(job->parts[p].unit));
            out_set(item, "max_abs_error",
                    r->error.n ? out_real(r->error.max_abs) : json_null());
            out_set(item, "rms_error", out_real(value_error_rms(&r->error)));
            out_set(item, "relative_error", out_real(value_error_relative(&r->error)));
            out_set(item, "elements_not_finite", json_integer((json_int_t)r->error.n_not_finite));
            out_append(layers, item);
        }
    }
    out_set(doc, "layers", layers);
    for (i = 0; i < job->n_keys; i++) {
        json_t *item = json_object();
        out_set(item, "key", out_string(job->keys[i]));
        out_set(item, "a", out_string(dspark_checkpoint_metadata(job->a.file, job->keys[i])));
        out_set(item, "b", out_string(dspark_checkpoint_metadata(job->b.file, job->keys[i])));
        out_append(metadata, item);
    }
    out_set(doc, "metadata", metadata);
    return out_json(doc);
}

static void close_file(cache_file *f)
{
    dspark_checkpoint_close(f->file);
    free(f->rows);
}

int compare_files(const char *path_a, const char *path_b, int json)
{
    files_job *job = calloc(1, sizeof *job);
    dspark_error err = {0};
    dspark_status st;
    uint32_t l;
    size_t p;
    int code, equal;
    if (!job) return out_error(EXIT_INTERNAL, "out of memory");
    if ((st = open_file(&job->a, path_a, &err)) != DSPARK_OK) goto fail;
    if ((st = open_file(&job->b, path_b, &err)) != DSPARK_OK) goto fail;
    if ((st = match_files(job, &err)) != DSPARK_OK) goto fail;
    find_parts(job);
    st = job->by_position ? compare_rows(job, &err) : compare_slots(job, &err);
    if (st != DSPARK_OK) goto fail;
    compare_metadata(job);
    for (l = 0; l < job->a.n_layers; l++)
        for (p = 0; p < job->n_parts; p++) {
            job->n_differ += job->results[l][p].n_differ;
            job->n_not_finite += job->results[l][p].error.n_not_finite;
        }
    equal = job->n_compared && !job->n_differ && !job->only_a && !job->only_b && !job->scales_differ;
    code = json ? print_json(job, equal) : print_text(job);
    if (code == EXIT_OK && !equal) code = EXIT_CHECK_FAILED;
    goto done;
fail:
    code = out_fail(st, &err);
done:
    close_file(&job->a);
    close_file(&job->b);
    free(job);
    return code;
}
