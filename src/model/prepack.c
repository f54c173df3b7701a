/* Writing a prepacked file: an opening whose shards go to the file, piece by piece as they are packed,
 * instead of staying in memory. Owns the file's order; what is in it is prepacked.h's. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/status.h"
#include "ckpt/outfile.h"
#include "model/model.h"
#include "model/prepacked.h"

#define LARGE_FROM ((uint64_t)4 << 20)
#define LARGE_ALIGN ((uint64_t)2 << 20)

struct dspark__packer {
    dspark__outfile file;
    dspark__prepacked_head head;
    uint64_t at;           /* where the next byte goes */
    dspark__section now;
    uint64_t put;          /* bytes of the section so far */
    dspark__digest digest; /* of the section */
    unsigned char *table;  /* [capacity][DSPARK__SECTION_BYTES] */
    uint32_t capacity;
};

dspark__prepacked_head *dspark__packer_head(dspark__packer *p)
{
    return &p->head;
}

static dspark_status grow_table(dspark__packer *p, dspark_error *err)
{
    if (p->head.n_sections < p->capacity) return DSPARK_OK;
    uint32_t capacity = p->capacity ? 2 * p->capacity : 64;
    unsigned char *grown = realloc(p->table, (size_t)capacity * DSPARK__SECTION_BYTES);
    if (!grown) return dspark__fail_nomem(err, "the table of sections", capacity);
    p->table = grown;
    p->capacity = capacity;
    return DSPARK_OK;
}

/* Holes read as zeros and take no room. */
static dspark_status put_bytes(dspark__packer *p, const void *data, size_t n, dspark_error *err)
{
    dspark_status st = dspark__outfile_write_at(&p->file, data, n, p->at, err);
    p->at += n;
    return st;
}

static dspark_status begin_section(dspark__packer *p, const dspark__merged_linear *ml, uint32_t s,
                                   const char *scheme, uint64_t bytes, dspark_error *err)
{
    const dspark__shard *shard = &ml->shards[s];
    const uint64_t align = bytes >= LARGE_FROM ? LARGE_ALIGN : 64;
    dspark_status st = grow_table(p, err);
    if (st != DSPARK_OK) return st;
    if (!dspark__align_u64(p->at, align, &p->at))
        return dspark__fail(err, DSPARK_EINVAL, ml->name, "the file would be larger than files can be");
    p->now = (dspark__section){.shard = s, .rows = shard->rows, .k = ml->k, .packing = shard->packing,
                               .offset = p->at, .bytes = bytes};
    snprintf(p->now.name, sizeof p->now.name, "%s", ml->name);
    snprintf(p->now.scheme, sizeof p->now.scheme, "%s", scheme);
    p->put = 0;
    dspark__digest_init(&p->digest);
    return DSPARK_OK;
}

dspark_status dspark__packer_begin(dspark__packer *p, const dspark__merged_linear *ml, uint32_t s,
                                   const dspark__scheme *scheme, dspark_error *err)
{
    return begin_section(p, ml, s, scheme->name, ml->shards[s].bytes, err);
}

dspark_status dspark__packer_put_shard(dspark__packer *p, const dspark__merged_linear *ml, uint32_t s,
                                       const dspark__markov_bound *bound, dspark_error *err)
{
    const dspark__shard *shard = &ml->shards[s];
    const void *from = bound ? bound->panels : shard->codes;
    const uint64_t bytes = bound ? bound->bytes : shard->bytes;
    dspark_status st = begin_section(p, ml, s, bound ? DSPARK__SECTION_BOUND : shard->scheme->name, bytes, err);
    if (st == DSPARK_OK) st = dspark__packer_put(p, from, (size_t)bytes, err);
    return st == DSPARK_OK ? dspark__packer_end(p, err) : st;
}

dspark_status dspark__packer_put(dspark__packer *p, const void *data, size_t n, dspark_error *err)
{
    if (n == 0) return DSPARK_OK;
    p->put += n;
    dspark__digest_update(&p->digest, data, n);
    return put_bytes(p, data, n, err);
}

dspark_status dspark__packer_end(dspark__packer *p, dspark_error *err)
{
    if (p->put != p->now.bytes)
        return dspark__fail(err, DSPARK_EINTERNAL, p->now.name, "%llu bytes of %llu were packed",
                            (unsigned long long)p->put, (unsigned long long)p->now.bytes);
    dspark__digest_hex(&p->digest, p->now.digest);
    dspark__section_encode(&p->now, p->table + (size_t)p->head.n_sections * DSPARK__SECTION_BYTES);
    p->head.n_sections++;
    return DSPARK_OK;
}

/* Table, then the head that makes the file one. */
static dspark_status finish(dspark__packer *p, dspark_error *err)
{
    unsigned char bytes[DSPARK__HEAD_BYTES];
    const size_t table = (size_t)p->head.n_sections * DSPARK__SECTION_BYTES;
    dspark__digest d;
    if (!dspark__align_u64(p->at, 64, &p->at))
        return dspark__fail(err, DSPARK_EINVAL, p->file.path, "the file would be larger than files can be");
    p->head.table_offset = p->at;
    p->head.file_bytes = p->at + table;
    dspark__digest_init(&d);
    dspark__digest_update(&d, p->table, table);
    dspark__digest_hex(&d, p->head.table);
    dspark_status st = put_bytes(p, p->table, table, err);
    dspark__prepacked_encode(&p->head, bytes);
    if (st == DSPARK_OK) st = dspark__outfile_write_at(&p->file, bytes, sizeof bytes, 0, err);
    return st == DSPARK_OK ? dspark__outfile_commit(&p->file, err) : st;
}

/* ---- identity ---- */

static int64_t now_ns(void)
{
    struct timespec t = {0};
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* From when on a write must leave another time than `changed`: times tick by some milliseconds where
 * they have fractions, and by up to two seconds where they have none. */
static int64_t safe_after(int64_t changed)
{
    return changed + (changed % 1000000000 ? 100000000 : 2000000000);
}

/* Wait until a write to the checkpoint can no longer leave its times as they are now. A time in the
 * future is not waited for: then no identity is recorded. */
static dspark_status let_files_age(const char *ckpt, dspark_error *err)
{
    dspark_checkpoint *c = NULL;
    char hex[33];
    int64_t newest = 0;
    dspark_status st = dspark__checkpoint_open(&c, ckpt, err);
    if (st == DSPARK_OK) st = dspark__checkpoint_identity(c, hex, &newest, err);
    dspark__checkpoint_close(c);
    if (st != DSPARK_OK) return st;
    for (int i = 0; i < 30 && safe_after(newest) >= now_ns(); i++)
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    return DSPARK_OK;
}

/* At the end, and only when nothing has changed since `start`. */
static dspark_status note_identity(const dspark_checkpoint *c, int64_t start, char identity[33],
                                   dspark_error *err)
{
    int64_t newest = 0;
    if (!c) return DSPARK_OK;
    dspark_status st = dspark__checkpoint_identity(c, identity, &newest, err);
    if (st == DSPARK_OK && safe_after(newest) >= start) memset(identity, 0, 33);
    return st;
}

dspark_status dspark__prepack(const char *ckpt, const char *out, const dspark_model_opts *opts,
                              dspark_error *err)
{
    dspark_status st;
    dspark_model *m = NULL;
    if (opts->vllm_compat || opts->prepacked)
        return dspark__fail(err, DSPARK_EINVAL, opts->prepacked ? "prepacked" : "vllm_compat",
                            "does not go into a prepacked file");
    dspark__packer *p = dspark__alloc(NULL, sizeof *p, 64);
    if (!p) return dspark__fail_nomem(err, out, sizeof *p);
    memset(p, 0, sizeof *p);
    p->at = DSPARK__HEAD_BYTES;
    st = dspark__outfile_create(&p->file, out, 1, err);
    if (st == DSPARK_OK) st = let_files_age(ckpt, err);
    const int64_t start = now_ns();
    if (st == DSPARK_OK) st = dspark__model_open_packing(&m, ckpt, opts, p, err);
    if (st == DSPARK_OK) {
        p->head.parts = m->parts;
        memcpy(p->head.config, m->config_digest, sizeof p->head.config);
        memcpy(p->head.context, m->fingerprint, sizeof p->head.context);
        memcpy(p->head.block, m->block_fingerprint, sizeof p->head.block);
        st = note_identity(m->ckpt, start, p->head.identity, err);
        if (st == DSPARK_OK && p->head.target[0])
            st = note_identity(m->block.target, start, p->head.target, err);
        if (st == DSPARK_OK) st = finish(p, err);
    }
    dspark__model_close(m);
    dspark__outfile_abort(&p->file);
    free(p->table);
    dspark__free(NULL, p, sizeof *p);
    return st;
}

dspark_status dspark__prepacked_check(const char *ckpt, const char *file, const dspark_model_opts *opts,
                                      dspark_error *err)
{
    dspark_model *m = NULL;
    dspark_model_opts own = *opts;
    own.prepacked = file;
    own.prepacked_verify = 1;
    dspark_status st = dspark__prepacked_parts(file, &own.parts, err);
    if (st == DSPARK_OK) st = dspark__model_open_packing(&m, ckpt, &own, NULL, err);
    dspark__model_close(m);
    return st;
}
