/* Reading a prepacked file: map, check, hand out shards in order. Owns the mapping; knows no part of the
 * model. */
#include "model/prepacked.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/status.h"

struct dspark__prepacked {
    const char *path;
    int fd;
    unsigned char *map;
    size_t size;
    dspark__prepacked_head head;
    uint32_t next; /* the section that a shard takes next */
};

static dspark_status map_file(dspark__prepacked *p, dspark_error *err)
{
    struct stat info;
    p->fd = open(p->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (p->fd < 0) return dspark__fail_errno(err, p->path, "the prepacked file cannot be opened", errno);
    if (fstat(p->fd, &info) != 0) return dspark__fail_errno(err, p->path, "fstat", errno);
    if (!S_ISREG(info.st_mode))
        return dspark__fail(err, DSPARK_EIO, p->path, "a prepacked file must be a regular file");
    if (info.st_size < (off_t)DSPARK__HEAD_BYTES || (uint64_t)info.st_size > SIZE_MAX)
        return dspark__fail(err, DSPARK_EFORMAT, p->path,
                            "not a prepacked file: it has %lld bytes, and a head alone has %u", (long long)info.st_size,
                            DSPARK__HEAD_BYTES);
    p->size = (size_t)info.st_size;
    void *map = mmap(NULL, p->size, PROT_READ, MAP_SHARED, p->fd, 0);
    if (map == MAP_FAILED) return dspark__fail_errno(err, p->path, "mmap", errno);
    p->map = map;
#if defined(MADV_HUGEPAGE)
    (void)madvise(map, p->size, MADV_HUGEPAGE); /* advice: not every file system has large pages */
#endif
    return DSPARK_OK;
}

static dspark_status section_at(const dspark__prepacked *p, uint32_t i, dspark__section *s,
                                dspark_error *err)
{
    const unsigned char *at = p->map + p->head.table_offset + (size_t)i * DSPARK__SECTION_BYTES;
    return dspark__section_decode(s, at, i, p->path, err);
}

/* Sections in order, aligned, apart from each other, between head and table. */
static dspark_status check_places(const dspark__prepacked *p, dspark_error *err)
{
    uint64_t end = DSPARK__HEAD_BYTES;
    for (uint32_t i = 0; i < p->head.n_sections; i++) {
        dspark__section s;
        uint64_t stop;
        dspark_status st = section_at(p, i, &s, err);
        if (st != DSPARK_OK) return st;
        if (s.offset % 64 != 0 || s.offset < end || s.bytes == 0 ||
            !dspark__add_u64(s.offset, s.bytes, &stop) || stop > p->head.table_offset)
            return dspark__fail(err, DSPARK_EFORMAT, p->path,
                                "section %u (%s) begins at byte %llu and has %llu: expected a multiple of 64 "
                                "from %llu on, and an end up to %llu",
                                i, s.name, (unsigned long long)s.offset, (unsigned long long)s.bytes,
                                (unsigned long long)end, (unsigned long long)p->head.table_offset);
        end = stop;
    }
    return DSPARK_OK;
}

static dspark_status check_file(dspark__prepacked *p, dspark_error *err)
{
    char hex[33];
    uint64_t end;
    dspark__digest d;
    dspark_status st = dspark__prepacked_decode(&p->head, p->map, p->path, err);
    if (st != DSPARK_OK) return st;
    const dspark__prepacked_head *h = &p->head;
    if (h->parts != DSPARK_PART_CONTEXT && h->parts != (DSPARK_PART_CONTEXT | DSPARK_PART_Q_A) &&
        h->parts != (DSPARK_PART_CONTEXT | DSPARK_PART_Q_A | DSPARK_PART_BLOCK))
        return dspark__fail(err, DSPARK_EFORMAT, p->path, "the head names parts 0x%x: expected 0x1, 0x3 or 0x7",
                            h->parts);
    if (h->file_bytes != p->size)
        return dspark__fail(err, DSPARK_EFORMAT, p->path, "the file has %zu bytes, and its head says %llu: %s", p->size,
                            (unsigned long long)h->file_bytes,
                            p->size < h->file_bytes ? "it was cut" : "something follows it");
    const uint64_t table = (uint64_t)h->n_sections * DSPARK__SECTION_BYTES;
    if (h->table_offset < DSPARK__HEAD_BYTES || !dspark__add_u64(h->table_offset, table, &end) ||
        end != p->size)
        return dspark__fail(err, DSPARK_EFORMAT, p->path,
                            "the table of %u sections at byte %llu does not end with the file, at %zu",
                            h->n_sections, (unsigned long long)h->table_offset, p->size);
    dspark__digest_init(&d);
    dspark__digest_update(&d, p->map + h->table_offset, (size_t)table);
    dspark__digest_hex(&d, hex);
    if (strcmp(hex, h->table) != 0)
        return dspark__fail(err, DSPARK_EFORMAT, p->path, "the table is damaged: its digest was %.32s and is now %s",
                            h->table, hex);
    return check_places(p, err);
}

dspark_status dspark__prepacked_open(dspark__prepacked **out, const char *path, dspark_error *err)
{
    dspark_status st;
    *out = NULL;
    dspark__prepacked *p = dspark__alloc(NULL, sizeof *p, 64);
    if (!p) return dspark__fail_nomem(err, path, sizeof *p);
    *p = (dspark__prepacked){.path = path, .fd = -1};
    if ((st = map_file(p, err)) != DSPARK_OK) goto fail;
    if ((st = check_file(p, err)) != DSPARK_OK) goto fail;
    *out = p;
    return DSPARK_OK;
fail:
    dspark__prepacked_close(p);
    return st;
}

dspark_status dspark__prepacked_parts(const char *path, uint32_t *parts, dspark_error *err)
{
    dspark__prepacked *p;
    dspark_status st = dspark__prepacked_open(&p, path, err);
    if (st != DSPARK_OK) return st;
    *parts = p->head.parts;
    dspark__prepacked_close(p);
    return DSPARK_OK;
}

void dspark__prepacked_close(dspark__prepacked *p)
{
    if (!p) return;
    if (p->map) munmap(p->map, p->size);
    if (p->fd >= 0) close(p->fd);
    dspark__free(NULL, p, sizeof *p);
}

const dspark__prepacked_head *dspark__prepacked_get_head(const dspark__prepacked *p)
{
    return &p->head;
}

dspark_status dspark__prepacked_same(const dspark__prepacked *p, const char *what, const char *recorded,
                                     const char *found, dspark_error *err)
{
    if (strcmp(recorded, found) == 0) return DSPARK_OK;
    return dspark__fail(err, DSPARK_EMODEL, p->path,
                        "made of another checkpoint, or of this one before it changed: the digest of %s "
                        "was %.32s and is now %.32s; pack it again",
                        what, recorded, found);
}

static const char *name_parts(uint32_t parts)
{
    if ((parts & DSPARK_PART_BLOCK) == DSPARK_PART_BLOCK) return "drafting";
    return parts & DSPARK_PART_Q_A ? "context KV on every path" : "context KV";
}

dspark_status dspark__prepacked_match(const dspark__prepacked *p, uint32_t parts, const char *config,
                                      dspark_error *err)
{
    if ((p->head.parts & parts) != parts)
        return dspark__fail(err, DSPARK_EMODEL, p->path,
                            "holds what %s needs, and what %s needs is asked for: pack it again with those parts",
                            name_parts(p->head.parts), name_parts(parts));
    return dspark__prepacked_same(p, "config.json", p->head.config, config, err);
}

dspark_status dspark__prepacked_end(const dspark__prepacked *p, uint32_t parts, dspark_error *err)
{
    dspark__section s;
    if (parts != p->head.parts || p->next >= p->head.n_sections) return DSPARK_OK;
    dspark_status st = section_at(p, p->next, &s, err);
    if (st != DSPARK_OK) return st;
    return dspark__fail(err, DSPARK_EFORMAT, p->path,
                        "section %u (%s, shard %u) belongs to none of the parts 0x%x that the head names", p->next,
                        s.name, s.shard, p->head.parts);
}

static const dspark__scheme *find_scheme(const char *name)
{
    size_t n;
    const dspark__scheme *const *all = dspark__scheme_table(&n);
    for (size_t i = 0; i < n; i++)
        if (strcmp(all[i]->name, name) == 0) return all[i];
    return NULL;
}

static dspark_status check_bytes(const dspark__prepacked *p, const dspark__section *s, dspark_error *err)
{
    char hex[33];
    dspark__digest d;
    dspark__digest_init(&d);
    dspark__digest_update(&d, p->map + s->offset, (size_t)s->bytes);
    dspark__digest_hex(&d, hex);
    if (strcmp(hex, s->digest) == 0) return DSPARK_OK;
    return dspark__fail(err, DSPARK_EFORMAT, p->path, "%s, shard %u, is damaged: its digest was %.32s and is now %s",
                        s->name, s->shard, s->digest, hex);
}

/* Columns index x. */
static dspark_status check_permutation(const dspark__prepacked *p, const dspark__shard *shard, uint32_t k,
                                       dspark_error *err)
{
    for (uint32_t i = 0; shard->perm && i < k; i++)
        if (shard->perm[i] >= k)
            return dspark__fail(err, DSPARK_EFORMAT, p->path,
                                "place %u of a permutation of %u columns names column %u", i, k,
                                shard->perm[i]);
    return DSPARK_OK;
}

/* Before a section is used. */
static dspark_status check_section(const dspark__prepacked *p, const dspark__section *s, int verify,
                                   dspark_error *err)
{
    struct stat info;
    if (fstat(p->fd, &info) != 0 || (uint64_t)info.st_size != p->size)
        return dspark__fail(err, DSPARK_EIO, p->path, "the file has changed its size since it was opened");
    return verify ? check_bytes(p, s, err) : DSPARK_OK;
}

dspark_status dspark__prepacked_take(dspark__prepacked *p, dspark__merged_linear *ml, uint32_t s,
                                     int verify, dspark_error *err)
{
    dspark__section section = {0};
    dspark_status st = DSPARK_OK;
    if (p->next < p->head.n_sections) st = section_at(p, p->next, &section, err);
    if (st != DSPARK_OK) return st;
    const dspark__scheme *scheme = find_scheme(section.scheme);
    if (strcmp(section.name, ml->name) != 0 || section.shard != s || section.k != ml->k ||
        section.rows != ml->shards[s].rows || !scheme || ml->shards[s].scheme)
        return dspark__fail(err, DSPARK_EFORMAT, p->path,
                            "section %u: expected %s, shard %u [%u, %u], found %s, shard %u [%u, %u] %s",
                            p->next, ml->name, s, ml->shards[s].rows, ml->k, section.name, section.shard,
                            section.rows, section.k, section.scheme);
    if (section.packing.narrow != ml->narrow)
        return dspark__fail(err, DSPARK_EFORMAT, p->path,
                            "section %u: the last panel of %s, shard %u, must%s be narrow", p->next, ml->name, s, ml->narrow ? "" : " not");
    if ((st = check_section(p, &section, verify, err)) != DSPARK_OK) return st;
    dspark__shard_attach(ml, s, &section.packing, scheme, p->map + section.offset);
    p->next++;
    return check_permutation(p, &ml->shards[s], ml->k, err);
}

/* Same numbers: both were zero before, or decoded from as many bytes. */
static int same_packing(const dspark__packing *a, const dspark__packing *b)
{
    return a->bits == b->bits && a->group == b->group && a->row_scale == b->row_scale &&
           a->permuted == b->permuted && a->narrow == b->narrow && a->format.bits == b->format.bits &&
           a->format.scale == b->format.scale && a->format.block == b->format.block &&
           memcmp(a->format.table, b->format.table, sizeof a->format.table) == 0;
}

dspark_status dspark__prepacked_take_bound(dspark__prepacked *p, const dspark__merged_linear *ml,
                                           dspark__markov_bound *out, int verify, dspark_error *err)
{
    dspark__section section = {0};
    dspark_status st = DSPARK_OK;
    memset(out, 0, sizeof *out);
    if (p->next < p->head.n_sections) st = section_at(p, p->next, &section, err);
    if (st != DSPARK_OK || strcmp(section.scheme, DSPARK__SECTION_BOUND) != 0) return st;
    if (strcmp(section.name, ml->name) != 0 || section.shard != 0 || section.k != ml->k ||
        section.rows != ml->shards[0].rows || !same_packing(&section.packing, &ml->shards[0].packing))
        return dspark__fail(err, DSPARK_EFORMAT, p->path,
                            "section %u: expected bounds of %s [%u, %u] as it is packed, found those of %s, shard %u "
                            "[%u, %u]",
                            p->next, ml->name, ml->shards[0].rows, ml->k, section.name, section.shard, section.rows,
                            section.k);
    if ((st = check_section(p, &section, verify, err)) != DSPARK_OK) return st;
    const char *wrong = dspark__markov_bound_attach(out, ml, p->map + section.offset);
    if (wrong) return dspark__fail(err, DSPARK_EFORMAT, p->path, "bounds of %s: %s", ml->name, wrong);
    p->next++;
    return DSPARK_OK;
}
