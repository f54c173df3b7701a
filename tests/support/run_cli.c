/* run_cli: fork, exec, two files for what was said. */
#include "support/run_cli.h"

#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_ARGS 64

static char folder[512];
static char said_path[600], error_path[600];
static cli_result result;

const char *cli_folder(void)
{
    const char *base = getenv("TMPDIR");
    if (folder[0]) return folder;
    snprintf(folder, sizeof folder, "%.400s/dspark-test-XXXXXX", base && *base ? base : "/tmp");
    if (!mkdtemp(folder)) {
        perror(folder);
        exit(1);
    }
    snprintf(said_path, sizeof said_path, "%s.stdout", folder);
    snprintf(error_path, sizeof error_path, "%s.stderr", folder);
    return folder;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)st;
    (void)kind;
    (void)at;
    return remove(path);
}

void cli_cleanup(void)
{
    if (!folder[0]) return;
    nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    unlink(said_path);
    unlink(error_path);
    free(result.out);
    free(result.err);
    memset(&result, 0, sizeof result);
    folder[0] = 0;
}

char *read_whole_file(const char *path, size_t *n_bytes)
{
    FILE *f = fopen(path, "rb");
    char *text = NULL;
    long n;
    if (!f) return NULL;
    if (fseek(f, 0, SEEK_END) == 0 && (n = ftell(f)) >= 0 && fseek(f, 0, SEEK_SET) == 0 &&
        (text = malloc((size_t)n + 1))) {
        size_t got = fread(text, 1, (size_t)n, f);
        text[got] = 0;
        if (n_bytes) *n_bytes = got;
    }
    fclose(f);
    return text;
}

static pid_t start(const char *program, const char *args, const char *out_path)
{
    char text[4096], *argv[MAX_ARGS], *word;
    int n = 0;
    pid_t pid;
    cli_folder();
    snprintf(text, sizeof text, "%s", args);
    argv[n++] = (char *)program;
    for (word = strtok(text, " "); word && n + 1 < MAX_ARGS; word = strtok(NULL, " "))
        argv[n++] = word;
    argv[n] = NULL;
    pid = fork();
    if (pid == 0) {
        int out = open(out_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        int err = open(error_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (out < 0 || err < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0 || chdir(folder) != 0)
            _exit(126);
        setenv("TMPDIR", folder, 1);
        execv(program, argv);
        _exit(127);
    }
    return pid;
}

static cli_result finish(pid_t pid, const char *out_path)
{
    int status = 0;
    free(result.out);
    free(result.err);
    memset(&result, 0, sizeof result);
    if (pid < 0 || waitpid(pid, &status, 0) != pid) exit(1);
    result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    if (strcmp(out_path, said_path) == 0) result.out = read_whole_file(said_path, &result.n_out);
    if (!result.out) result.out = calloc(1, 1);
    result.err = read_whole_file(error_path, NULL);
    if (!result.err) result.err = calloc(1, 1);
    return result;
}

cli_result run_program(const char *program, const char *args)
{
    cli_folder();
    return finish(start(program, args, said_path), said_path);
}

cli_result run_cli(const char *fmt, ...)
{
    char text[4096];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return run_program(DSPARK_CLI, text);
}

cli_result run_cli_into(const char *path, const char *args)
{
    cli_folder();
    return finish(start(DSPARK_CLI, args, path), path);
}

cli_result run_cli_cancelled(const char *part, const char *args)
{
    const struct timespec pause = {0, 200000};
    pid_t pid;
    int i, gone = 0;
    cli_folder();
    pid = start(DSPARK_CLI, args, said_path);
    for (i = 0; i < 100000 && !folder_has(part) && !gone; i++) {
        siginfo_t info;
        memset(&info, 0, sizeof info);
        gone = waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
               info.si_pid == pid;
        nanosleep(&pause, NULL);
    }
    kill(pid, SIGTERM);
    return finish(pid, said_path);
}

int folder_has(const char *part)
{
    DIR *d = opendir(cli_folder());
    struct dirent *entry;
    int found = 0;
    while (d && (entry = readdir(d)))
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..") &&
            strstr(entry->d_name, part))
            found = 1;
    if (d) closedir(d);
    return found;
}

int same_files(const char *a, const char *b)
{
    char path_a[700], path_b[700], *x, *y;
    size_t n_a = 0, n_b = 0;
    int same;
    snprintf(path_a, sizeof path_a, "%s/%s", cli_folder(), a);
    snprintf(path_b, sizeof path_b, "%s/%s", cli_folder(), b);
    x = read_whole_file(path_a, &n_a);
    y = read_whole_file(path_b, &n_b);
    same = x && y && n_a == n_b && memcmp(x, y, n_a) == 0;
    free(x);
    free(y);
    return same;
}
