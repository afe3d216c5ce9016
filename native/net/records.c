/* records.c: sealed records over a stream socket. */
#include "records.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum { NONCE = 12, GET_TAG = 0x10, SET_TAG = 0x11 };
enum { BUFFER = RECORD_HEAD + RECORD_MOST + RECORD_TAG };

/* ---- libcrypto ---- */

static struct {
    void *(*new_context)(void);
    void (*free_context)(void *);
    const void *(*aes_256_gcm)(void);
    int (*init)(void *, const void *, void *, const uint8_t *, const uint8_t *, int);
    int (*update)(void *, uint8_t *, int *, const uint8_t *, int);
    int (*final)(void *, uint8_t *, int *);
    int (*control)(void *, int, int, void *);
    bool is_there;
} crypto;

static bool look_up(void *library, const char *name, void *out)
{
    void *found = dlsym(library, name);
    memcpy(out, &found, sizeof found);    /* ISO C has no conversion from an object's pointer to a function's */
    return found != NULL;
}

static void open_crypto(void)
{
    static const char *const names[] = {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"};
    for (size_t i = 0; i < sizeof names / sizeof *names && !crypto.is_there; i++) {
        void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        crypto.is_there = library && look_up(library, "EVP_CIPHER_CTX_new", &crypto.new_context) &&
                          look_up(library, "EVP_CIPHER_CTX_free", &crypto.free_context) &&
                          look_up(library, "EVP_aes_256_gcm", &crypto.aes_256_gcm) &&
                          look_up(library, "EVP_CipherInit_ex", &crypto.init) &&
                          look_up(library, "EVP_CipherUpdate", &crypto.update) &&
                          look_up(library, "EVP_CipherFinal_ex", &crypto.final) &&
                          look_up(library, "EVP_CIPHER_CTX_ctrl", &crypto.control);
        if (library && !crypto.is_there)
            dlclose(library);
    }
}

/* ---- one direction ---- */

struct records {
    void *context;
    bool seals;
    uint64_t number;                      /* of the next record */
    uint8_t *buffer;                      /* NULL: nothing is in it */
    uint32_t start, end;                  /* what is to be sent, or was opened and not handed out */
    uint32_t got;                         /* receiving: bytes of a record that is not whole */
};

int records_new(const uint8_t *key, bool seals, records **out)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_crypto);
    if (!crypto.is_there)
        return -ENOTSUP;
    records *r = calloc(1, sizeof *r);
    if (!r)
        return -ENOMEM;
    r->seals = seals;
    r->context = crypto.new_context();
    if (!r->context || crypto.init(r->context, crypto.aes_256_gcm(), NULL, key, NULL, seals) != 1) {
        records_free(r);
        return -ENOMEM;
    }
    *out = r;
    return 0;
}

void records_free(records *r)
{
    if (!r)
        return;
    if (r->context)
        crypto.free_context(r->context);  /* it wipes the key */
    free(r->buffer);
    free(r);
}

static bool has_buffer(records *r)
{
    return r->buffer || (r->buffer = malloc(BUFFER));
}

static void drop_buffer(records *r)
{
    free(r->buffer);
    r->buffer = NULL;
    r->start = r->end = r->got = 0;
}

/* Begins the next record, whose length is authenticated. No number is used twice: a connection ends long before 2^64. */
static bool begin(records *r, const uint8_t *head)
{
    uint8_t nonce[NONCE] = {0};
    int none;
    memcpy(nonce + NONCE - sizeof r->number, &r->number, sizeof r->number);
    r->number++;
    return r->number && crypto.init(r->context, NULL, NULL, NULL, nonce, r->seals) == 1 &&
           crypto.update(r->context, NULL, &none, head, RECORD_HEAD) == 1;
}

/* ---- sending ---- */

/* Seals as many bytes as a record may have, from `*at` bytes into piece `*i` on. Returns their number, or -1. */
static int64_t seal(records *r, const struct iovec *iov, uint32_t count, uint32_t *i, size_t *at)
{
    uint32_t bytes = 0;
    size_t skip = *at;
    for (uint32_t n = *i; n < count && bytes < RECORD_MOST; n++, skip = 0) {
        size_t left = iov[n].iov_len - skip;
        bytes += left < RECORD_MOST - bytes ? (uint32_t)left : RECORD_MOST - bytes;
    }
    memcpy(r->buffer, &bytes, RECORD_HEAD);
    if (!begin(r, r->buffer))
        return -1;
    uint8_t *to = r->buffer + RECORD_HEAD;
    for (uint32_t done = 0; done < bytes;) {
        size_t left = iov[*i].iov_len - *at;
        int now = (int)(left < bytes - done ? left : bytes - done), written;
        if (now && crypto.update(r->context, to + done, &written, (const uint8_t *)iov[*i].iov_base + *at, now) != 1)
            return -1;
        done += (uint32_t)now;
        *at += (size_t)now;
        if (*at == iov[*i].iov_len) {
            *at = 0;
            (*i)++;
        }
    }
    int none;
    if (crypto.final(r->context, to + bytes, &none) != 1 || crypto.control(r->context, GET_TAG, RECORD_TAG, to + bytes) != 1)
        return -1;
    r->start = 0;
    r->end = RECORD_HEAD + bytes + RECORD_TAG;
    return bytes;
}

/* Returns false if the socket has no room, or failed. */
static bool flush(records *r, int fd)
{
    while (r->start < r->end) {
        ssize_t got = send(fd, r->buffer + r->start, r->end - r->start, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return false;
        r->start += (uint32_t)got;
    }
    return true;
}

ssize_t records_send(records *r, int fd, const struct iovec *iov, uint32_t count)
{
    uint32_t i = 0;
    size_t at = 0;
    ssize_t taken = 0;
    while (flush(r, fd)) {
        while (i < count && at == iov[i].iov_len) {
            i++;
            at = 0;
        }
        if (i == count) {
            drop_buffer(r);
            return taken;
        }
        if (!has_buffer(r)) {
            errno = ENOMEM;
            return -1;
        }
        int64_t bytes = seal(r, iov, count, &i, &at);
        if (bytes < 0) {
            errno = EIO;
            return -1;
        }
        taken += bytes;
    }
    return taken || errno == EAGAIN || errno == EWOULDBLOCK ? taken : -1;
}

uint32_t records_wait(const records *r)
{
    return r ? r->end - r->start : 0;
}

/* ---- receiving ---- */

/* Opens the record in the buffer, whose plain bytes take its place. */
static bool open_record(records *r, uint32_t bytes)
{
    uint8_t *text = r->buffer + RECORD_HEAD;
    int written;
    if (!begin(r, r->buffer) || crypto.control(r->context, SET_TAG, RECORD_TAG, text + bytes) != 1 ||
        crypto.update(r->context, text, &written, text, (int)bytes) != 1 || crypto.final(r->context, text + bytes, &written) != 1)
        return false;
    r->start = RECORD_HEAD;
    r->end = RECORD_HEAD + bytes;
    r->got = 0;
    return true;
}

/* Receives what is missing of the next record, and opens it. Returns 1, 0 at the end of the stream, or -1 with errno. */
static int receive_record(records *r, int fd)
{
    uint32_t bytes = 0, whole = RECORD_HEAD;
    for (;;) {
        if (r->got >= RECORD_HEAD) {
            memcpy(&bytes, r->buffer, RECORD_HEAD);
            if (!bytes || bytes > RECORD_MOST)
                break;
            whole = RECORD_HEAD + bytes + RECORD_TAG;
        }
        if (r->got == whole && bytes) {
            if (!open_record(r, bytes))
                break;
            return 1;
        }
        ssize_t got = recv(fd, r->buffer + r->got, whole - r->got, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return (int)got;
        r->got += (uint32_t)got;
    }
    errno = EBADMSG;
    return -1;
}

static size_t hand_out(records *r, const struct iovec *iov, uint32_t count, size_t skip)
{
    size_t moved = 0;
    for (uint32_t i = 0; i < count && r->start < r->end; i++) {
        size_t from = skip < iov[i].iov_len ? skip : iov[i].iov_len, room = iov[i].iov_len - from, left = r->end - r->start;
        size_t now = room < left ? room : left;
        skip -= from;
        memcpy((uint8_t *)iov[i].iov_base + from, r->buffer + r->start, now);
        r->start += (uint32_t)now;
        moved += now;
    }
    return moved;
}

ssize_t records_receive(records *r, int fd, const struct iovec *iov, uint32_t count, bool only_left)
{
    size_t moved = 0, room = 0;
    for (uint32_t i = 0; i < count; i++)
        room += iov[i].iov_len;
    while (moved < room) {
        if (r->start < r->end) {
            moved += hand_out(r, iov, count, moved);
            continue;
        }
        if (only_left) {
            errno = EAGAIN;
            return moved ? (ssize_t)moved : -1;
        }
        if (!has_buffer(r)) {
            errno = ENOMEM;
            return -1;
        }
        int got = receive_record(r, fd);
        if (got == 1)
            continue;
        if (!r->got)
            drop_buffer(r);
        if (got == 0 && r->got) {         /* cut off in the middle of a record */
            errno = EBADMSG;
            got = -1;
        }
        if (!moved || (got < 0 && errno == EBADMSG))    /* no event would tell of a wrong record again */
            return got;
        break;
    }
    return (ssize_t)moved;
}

bool records_left(const records *r)
{
    return r && r->start < r->end;
}
