/* records.h: bytes of a connection under a seal. A process on the way can neither read them nor change, repeat, reorder or drop them
 * unnoticed.
 *
 * A record is its length in 4 bytes, at most RECORD_MOST bytes sealed with AES-256-GCM, and their tag of 16 bytes. The nonce is the
 * number of the record, which does not travel, and the length is authenticated as well. libcrypto does the work; it is opened when
 * the first seal is needed.
 *
 * What arrives is opened and compared before any byte of it is handed out, so memory of the caller has only bytes of the peer.
 * This process itself reads and writes memory. Unlike the kernel, it ends with SIGSEGV if that is not there: see connection_reaches().
 *
 * Each of the two is used by one thread at a time. Its buffer of 64 KiB exists while it is needed.                            */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

enum { RECORD_KEY = 32, RECORD_HEAD = 4, RECORD_TAG = 16, RECORD_MOST = 1 << 16 };

typedef struct records records;

int  records_new(const uint8_t *key, bool seals, records **out);    /* 0, -ENOTSUP without libcrypto, or -ENOMEM */
void records_free(records *r);            /* wipes the key; NULL is fine */

/* As sendmsg(): returns how many of these bytes are under way. What could not be sent of a record waits, and goes first. */
ssize_t records_send(records *r, int fd, const struct iovec *iov, uint32_t count);
uint32_t records_wait(const records *r);  /* bytes that were not sent; 0 for NULL */

/* As recvmsg(). EBADMSG: what came is not the next record of the peer. `only_left`: hands out what was opened, and receives nothing. */
ssize_t records_receive(records *r, int fd, const struct iovec *iov, uint32_t count, bool only_left);
bool records_left(const records *r);      /* bytes were opened, and not handed out */
