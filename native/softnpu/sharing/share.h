/* share.h: the conversation between share.c, which offers, and shared_fetch.c, which fetches. */
#pragma once
#include "runtime.h"
#include <sys/socket.h>

typedef struct soft_share_request { uint64_t key; uint32_t kind, reserved; } soft_share_request;
typedef struct soft_share_reply { int32_t code, reserved; soft_offer what; } soft_share_reply;   /* with the descriptor when code is 0 */

uint64_t soft_key_of(int32_t pid, unsigned number, uint64_t token);
int      soft_share_listen(unsigned *number);               /* a listening socket, or -1 */
int32_t  soft_share_peer(int socket);                       /* the other side's process id; -1: another user */
void     soft_share_limit(int socket, int ms);              /* on every send and receive */
void     soft_share_send(int socket, const soft_share_reply *reply, int fd);  /* fd may be -1 */
