/* A fuzzer for machines without clang's: it reads the folders, changes what is there, and runs the program on it. It knows
 * nothing of coverage. A sanitizer ends it at the first fault; the input is then in the file that artifact_prefix names.    */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
void __sanitizer_set_death_callback(void (*callback)(void));

enum { INPUTS_MAX = 4096, BYTES_MAX = 1 << 16 };

static struct { uint8_t *data; size_t size; } inputs[INPUTS_MAX];
static size_t count;
static uint8_t now[BYTES_MAX];
static size_t now_size;
static const char *prefix = "";
static uint64_t state;

static uint64_t next(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static size_t below(size_t limit)
{
    return limit ? next() % limit : 0;
}

static void keep_found(void)
{
    char path[4096];
    snprintf(path, sizeof path, "%scrash-%016llx", prefix, (unsigned long long)state);
    FILE *file = fopen(path, "wb");
    if (file) {
        fwrite(now, 1, now_size, file);
        fclose(file);
    }
}

static void read_folder(const char *path)
{
    DIR *folder = opendir(path);
    for (struct dirent *entry; folder && count < INPUTS_MAX && (entry = readdir(folder)); ) {
        char name[4096];
        struct stat status;
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        if (stat(name, &status) || !S_ISREG(status.st_mode))
            continue;
        FILE *file = fopen(name, "rb");
        uint8_t *data = malloc(BYTES_MAX);
        if (file && data) {
            inputs[count].size = fread(data, 1, BYTES_MAX, file);
            inputs[count++].data = data;
        }
        if (file)
            fclose(file);
    }
    if (folder)
        closedir(folder);
}

static void change(void)
{
    static const char marks[] = "{}[]\",:0-9.\\ \n";
    size_t at = below(now_size + 1), length = below(1 + (now_size - at < 64 ? now_size - at : 64));
    switch (below(5)) {
    case 0:                                             /* without a piece */
        memmove(now + at, now + at + length, now_size - at - length);
        now_size -= length;
        break;
    case 1:                                             /* with a piece twice */
        if (now_size + length <= BYTES_MAX) {
            memmove(now + at + length, now + at, now_size - at);
            now_size += length;
        }
        break;
    case 2:
        for (size_t i = at; i < at + length; i++)
            now[i] = (uint8_t)marks[below(sizeof marks - 1)];
        break;
    case 3:                                             /* with another one's end */
        if (count) {
            size_t other = below(count), from = below(inputs[other].size + 1), rest = inputs[other].size - from;
            rest = rest < BYTES_MAX - at ? rest : BYTES_MAX - at;
            memcpy(now + at, inputs[other].data + from, rest);
            now_size = at + rest;
        }
        break;
    default:
        if (at < now_size)
            now[at] ^= (uint8_t)(1u << below(8));
    }
}

static void run(void)
{
    uint8_t *exact = malloc(now_size ? now_size : 1);   /* so that ASan sees what is read behind the end */
    if (!exact)
        return;
    memcpy(exact, now, now_size);
    LLVMFuzzerTestOneInput(exact, now_size);
    free(exact);
}

int main(int argc, char **argv)
{
    long seconds = 60;
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "-max_total_time=", 16))
            seconds = atol(argv[i] + 16);
        else if (!strncmp(argv[i], "-artifact_prefix=", 17))
            prefix = argv[i] + 17;
        else if (argv[i][0] != '-')
            read_folder(argv[i]);
    }
    time_t end = time(NULL) + seconds;
    state = (uint64_t)time(NULL) * 0x9e3779b97f4a7c15u | 1;
    __sanitizer_set_death_callback(keep_found);
    unsigned long long tried = 0;
    for (size_t i = 0; i < count; i++, tried++) {
        memcpy(now, inputs[i].data, now_size = inputs[i].size);
        run();
    }
    for (; time(NULL) < end; tried++) {
        size_t first = below(count);
        now_size = count ? inputs[first].size : 0;
        if (count)
            memcpy(now, inputs[first].data, now_size);
        for (size_t changes = 1 + below(4); changes; changes--)
            change();
        run();
    }
    fprintf(stderr, "stat::number_of_executed_units: %llu\n", tried);
    return 0;
}
