/* A switch with long cables: passes Ethernet frames on between its ports, each after the same time,
 * but for some that are lost by chance.
 *
 *     delay MICROSECONDS LOST PORT PORT...
 *
 * LOST of a million frames are lost. The ports are network cards of this namespace, each with one host
 * at its other end. A line on standard output says that it works; it ends with the process that has
 * started it.
 *
 * Frames wait in one queue, as all wait equally long. They keep what the kernel has put off to the
 * card: checksums, and the cutting of what is larger than a packet.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    MOST_PORTS = 254,
    VNET_BYTES = 10,                 /* struct virtio_net_hdr, before each frame */
    MOST_BYTES = 1 << 17,            /* of a frame, with room to spare */
    QUEUE_BYTES = 64 << 20,          /* 4 hosts at 1 Gbit/s for 100 ms */
    SOCKET_BYTES = 32 << 20,         /* what a port's shaper holds, and more */
    TURN = 64,                       /* frames taken from one port before the others have their turn */
    TICK_NS = 250 * 1000             /* between looks, while there are frames */
};

struct frame {
    uint64_t due_ns;
    uint32_t bytes; /* 0: the next one is at the queue's beginning */
    uint32_t port;  /* it came from */
    unsigned char data[]; /* struct virtio_net_hdr, then the frame */
};

struct port {
    int fd;
    bool known; /* the host's address is */
    unsigned char address[ETH_ALEN];
};

static struct port ports[MOST_PORTS];
static uint32_t port_count;
static unsigned char *queue;
static size_t head, tail; /* offsets of the oldest frame, and of the next one; equal: it is empty */

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static void set(int fd, int level, int name, int value)
{
    if (setsockopt(fd, level, name, &value, sizeof value) != 0)
        fail("setsockopt");
}

static int open_port(const char *name)
{
    int fd = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        fail("socket");
    set(fd, SOL_PACKET, PACKET_VNET_HDR, 1);
    set(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, 1);
    set(fd, SOL_SOCKET, SO_RCVBUFFORCE, SOCKET_BYTES);
    set(fd, SOL_SOCKET, SO_SNDBUFFORCE, SOCKET_BYTES);
    struct sockaddr_ll at = {
        .sll_family = AF_PACKET,
        .sll_protocol = htons(ETH_P_ALL),
        .sll_ifindex = (int)if_nametoindex(name),
    };
    if (at.sll_ifindex == 0 || bind(fd, (struct sockaddr *)&at, sizeof at) != 0)
        fail(name);
    return fd;
}

/* Bytes that a frame takes in the queue. */
static size_t space(const struct frame *frame)
{
    return (sizeof *frame + frame->bytes + 7) / 8 * 8;
}

/* Where the next frame goes; NULL: the queue is full, and the frame is lost. */
static struct frame *room(void)
{
    size_t need = sizeof(struct frame) + MOST_BYTES;
    if (head <= tail && tail + 2 * need > QUEUE_BYTES) {
        if (head == 0)
            return NULL;
        ((struct frame *)(queue + tail))->bytes = 0;
        tail = 0;
    }
    if (tail < head && tail + need >= head)
        return NULL;
    return (struct frame *)(queue + tail);
}

/* Whether chance says so, in so many of a million cases: xorshift. */
static bool chance(uint32_t of_a_million)
{
    static uint64_t state = UINT64_C(0x9e3779b97f4a7c15);
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % 1000000 < of_a_million;
}

/* Takes some of what has come to a port. */
static void take(uint32_t number, uint64_t due_ns, uint32_t lost_of_a_million)
{
    static unsigned char lost[MOST_BYTES];
    struct port *port = &ports[number];
    for (int turn = 0; turn < TURN; turn++) {
        struct frame *frame = room();
        ssize_t got = recv(port->fd, frame ? frame->data : lost, MOST_BYTES, 0);
        if (got < 0)
            return; /* there is nothing, or the cable is pulled */
        if (frame == NULL || got < VNET_BYTES + ETH_HLEN)
            continue;
        memcpy(port->address, frame->data + VNET_BYTES + ETH_ALEN, ETH_ALEN);
        port->known = true;
        if (chance(lost_of_a_million))
            continue;
        *frame = (struct frame){.due_ns = due_ns, .bytes = (uint32_t)got, .port = number};
        tail += space(frame);
    }
}

/* Sends a frame to the port of its host, or to all others if that is not known. A port that takes no
 * more, or has no cable, loses it. */
static void pass_on(const struct frame *frame)
{
    const unsigned char *to = frame->data + VNET_BYTES;
    for (uint32_t at = 0; at < port_count; at++)
        if (ports[at].known && memcmp(ports[at].address, to, ETH_ALEN) == 0) {
            if (at != frame->port)
                send(ports[at].fd, frame->data, frame->bytes, 0);
            return;
        }
    for (uint32_t at = 0; at < port_count; at++)
        if (at != frame->port)
            send(ports[at].fd, frame->data, frame->bytes, 0);
}

static void pass_on_due(uint64_t now)
{
    while (head != tail) {
        struct frame *frame = (struct frame *)(queue + head);
        if (frame->bytes == 0) {
            head = 0;
            continue;
        }
        if (frame->due_ns > now)
            return;
        pass_on(frame);
        head += space(frame);
    }
}

int main(int count, char **arguments)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (count < 4 || count - 3 > MOST_PORTS) {
        fprintf(stderr, "usage: delay MICROSECONDS LOST PORT PORT...\n");
        return 2;
    }
    uint64_t delay_ns = strtoull(arguments[1], NULL, 10) * 1000;
    uint32_t lost = (uint32_t)strtoul(arguments[2], NULL, 10);
    /* A frame waits for half a tick on average until it is seen, and again until it is sent. */
    delay_ns -= delay_ns > TICK_NS ? TICK_NS : 0;
    prctl(PR_SET_TIMERSLACK, 1);
    /* Before the hosts, whose processes may keep all cores busy; where that is refused, as well as
     * can be. */
    struct sched_param first = {.sched_priority = 1};
    sched_setscheduler(0, SCHED_RR, &first);
    queue = mmap(NULL, QUEUE_BYTES, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (queue == MAP_FAILED)
        fail("mmap");
    struct pollfd polls[MOST_PORTS];
    port_count = (uint32_t)count - 3;
    for (uint32_t at = 0; at < port_count; at++) {
        ports[at].fd = open_port(arguments[3 + at]);
        polls[at] = (struct pollfd){.fd = ports[at].fd, .events = POLLIN};
    }
    puts("ready");
    fflush(stdout);
    for (;;) {
        if (head == tail) /* nothing is due */
            poll(polls, port_count, -1);
        uint64_t now = now_ns();
        for (uint32_t at = 0; at < port_count; at++)
            take(at, now + delay_ns, lost);
        pass_on_due(now);
        struct timespec tick = {.tv_nsec = TICK_NS};
        nanosleep(&tick, NULL);
    }
}
