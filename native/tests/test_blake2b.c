/* Seals, compared with those of Python's hashlib.blake2b(data, key=key, digest_size=16). */
#include "check.h"
#include "blake2b.h"
#include <errno.h>

enum { LONGEST = 1000 };

typedef struct vector { uint64_t key_size, size; const char *seal; } vector;

static const vector VECTORS[] = {         /* key: 0, 1, 2 ...; data: 0, 7, 14 ... */
    { 0, 0, "cae66941d9efbd404e4d88758ea67670" },
    { 0, 3, "0670ccd376552c74b1e07587db0a9977" },
    { 32, 0, "3daf97bce7888fd59773c66bf647459c" },
    { 32, 1, "cb0f7736a53974236661585b8842dd8c" },
    { 32, 8, "eec656128d0d6ce8a9b264c80bf9007d" },
    { 32, 127, "56c50fc8ab3ba8e49d9a5be7ae0dffdd" },
    { 32, 128, "bd11151f0fa75b9ddb73aed7a8680701" },
    { 32, 129, "481db86c5fab9fc21aced4004fe4b561" },
    { 64, 256, "7a68e4f93b1f1009a3d05c4fc0cda64e" },
    { 64, 1000, "25b7c9fa8d4622f2182d16c5d43e2559" },
    { 1, 257, "e234cd705e743fb5197362444f3ebabd" },
};

TEST(test_seals_are_those_of_hashlib)
{
    uint8_t key[BLAKE2B_MAX_KEY], data[LONGEST], seal[BLAKE2B_SEAL];
    for (int i = 0; i < BLAKE2B_MAX_KEY; i++)
        key[i] = (uint8_t)i;
    for (int i = 0; i < LONGEST; i++)
        data[i] = (uint8_t)(i * 7 % 256);
    for (size_t i = 0; i < sizeof VECTORS / sizeof *VECTORS; i++) {
        const vector *v = &VECTORS[i];
        char text[2 * BLAKE2B_SEAL + 1];
        uint8_t *own = malloc(v->size ? v->size : 1);     /* of exactly its size: a sanitizer sees what is read behind it */
        memcpy(own, data, v->size);
        CHECK_EQ(blake2b_seal(key, v->key_size, own, v->size, seal), 0);
        for (int at = 0; at < BLAKE2B_SEAL; at++)
            snprintf(text + 2 * at, 3, "%02x", seal[at]);
        CHECK(strcmp(text, v->seal) == 0);
        free(own);
    }
}

TEST(test_a_key_that_is_too_long_is_refused)
{
    uint8_t key[BLAKE2B_MAX_KEY + 1] = { 0 }, seal[BLAKE2B_SEAL];
    CHECK_EQ(blake2b_seal(key, sizeof key, key, 1, seal), -EINVAL);
}

int main(void)
{
    RUN(test_seals_are_those_of_hashlib);
    RUN(test_a_key_that_is_too_long_is_refused);
    return check_done();
}
