package cluster

// What hostile programs do, as roles: each runs in a process of its own inside a node, as whoever the test
// makes it. A role prints what it met; the test judges.

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	mrand "math/rand/v2"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/data"
	"github.com/sluice-hpc/sluice/daemon/internal/identity"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/node"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

func init() {
	node.Role("knock", knock)
	node.Role("stranger", stranger)
	node.Role("tickets", ticketTricks)
	node.Role("flood", flood)
	node.Role("noise", noise)
}

// knock SOCKET asks a lease's socket for a session, and prints what became of it.
func knock(args []string) error {
	f, err := site.Knock(args[0], wire.SessionCompute, 0)
	var refused *site.Refused
	switch {
	case errors.As(err, &refused):
		fmt.Println("refused:", refused.Reason)
	case err != nil:
		return err
	default:
		fmt.Println("session")
		return f.Close()
	}
	return nil
}

// stranger tries what a user may not do with another's lease, over the local socket, and prints each outcome.
func stranger(args []string) error {
	var l lease.Lease
	if err := json.Unmarshal([]byte(args[0]), &l); err != nil {
		return err
	}
	c, err := rpc.DialLocal("/run/sluice/sluiced.sock", "test")
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	ls, err := c.List(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("list: %d leases\n", len(ls))
	fmt.Printf("release by id: %v\n", c.Release(ctx, l.ID, lease.Key{}, "mine now"))
	fmt.Printf("release by key: %v\n", c.Release(ctx, "", l.Request.Key, "mine now"))
	r := l.Request
	got, _, err := c.Acquire(ctx, r)
	fmt.Printf("acquire with its key: %q %v\n", got.ID, err)
	r.Key.Job = "run-stranger"
	got, _, err = c.Acquire(ctx, r)
	fmt.Printf("acquire for its user: uid %d %v\n", got.Request.UID, err)
	if err == nil {
		_ = c.Release(ctx, got.ID, got.Request.Key, "done")
	}
	said, err := askSocket(args[1])
	fmt.Printf("its socket: %q %v\n", said, err)
	return nil
}

// askSocket asks for the first session at a lease's socket, as the shim does, and gives the answer's text.
func askSocket(path string) (string, error) {
	c, err := net.DialTimeout("unix", path, 5*time.Second)
	if err != nil {
		return "", err
	}
	defer c.Close()
	ask := make([]byte, 64)
	copy(ask, "SLUICE-L\x01\x00\x00\x00\x01\x00\x00\x00")
	if err := errors.Join(c.SetDeadline(time.Now().Add(10*time.Second)), second(c.Write(ask))); err != nil {
		return "", err
	}
	answer := make([]byte, 4096)
	n, err := c.Read(answer)
	return string(answer[:n]), err
}

func second[T any](_ T, err error) error { return err }

// offered is an owner that has just one offer to make.
type offered struct {
	lease.Owner
	offer lease.Offer
}

func (o offered) Offer(context.Context, string, lease.SessionRequest) (lease.Offer, error) {
	return o.offer, nil
}

// ticketTricks NODE OWNER ADDR OWN FOREIGN is a daemon of NODE that uses its own lease's tickets in every
// wrong way, and then tries the lease of another host.
func ticketTricks(args []string) error {
	self, owner, addr, own, foreign := args[0], args[1], args[2], args[3], args[4]
	id, err := identity.New(identity.Config{Node: self, Auth: identity.AuthMunge})
	if err != nil {
		return err
	}
	o, err := rpc.DialOwner(addr, owner, id, "test")
	if err != nil {
		return err
	}
	defer o.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	r := lease.SessionRequest{Lease: own, Kind: wire.SessionCompute, PID: 1, UID: user, Program: "tricks"}
	open := func(offer lease.Offer) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		f, err := (&data.Dialer{}).Open(ctx, offered{offer: offer}, addr, self, r)
		if err == nil {
			_ = f.Close()
		}
		return err
	}
	first, err := o.Offer(ctx, self, r)
	if err != nil {
		return fmt.Errorf("offer: %w", err)
	}
	forged := first
	forged.Secret[0] ^= 1
	fmt.Printf("wrong secret: %v\n", open(forged))
	fmt.Printf("right: %v\n", open(first))
	fmt.Printf("replayed: %v\n", open(first))
	late, err := o.Offer(ctx, self, r)
	if err != nil {
		return fmt.Errorf("offer: %w", err)
	}
	offered := time.Now()
	unknown := late
	_, _ = rand.Read(unknown.Ticket[:])
	fmt.Printf("unknown: %v\n", open(unknown))
	worn, err := o.Offer(ctx, self, r)
	if err != nil {
		return fmt.Errorf("offer: %w", err)
	}
	forged = worn
	forged.Secret[31] ^= 0x80
	for range 3 {
		_ = open(forged)
	}
	time.Sleep(time.Until(offered.Add(3300 * time.Millisecond))) // tickets live 3 s here
	fmt.Printf("late: %v\n", open(late))

	r.Lease = foreign
	_, err = o.Offer(ctx, self, r)
	fmt.Printf("foreign offer: %v\n", err)
	fmt.Printf("foreign confirm: %v\n", o.Confirm(ctx, self, foreign))
	fmt.Printf("foreign release: %v\n", o.Release(ctx, self, foreign, lease.Key{}, "mine now"))
	known, err := o.Renew(ctx, self, []string{foreign})
	fmt.Printf("foreign renew: %d %v\n", len(known), err)
	ls, err := o.List(ctx, self)
	if err != nil {
		return err
	}
	for _, l := range ls {
		if l.ID == foreign {
			fmt.Println("foreign lease is listed")
		}
	}
	return nil
}

// flood NETWORK ADDR COUNT SECONDS HALF opens connections and holds them all; with HALF it says half of
// something on each. It prints how many it ever had.
func flood(args []string) error {
	network, addr := args[0], args[1]
	count, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	seconds, err := strconv.Atoi(args[3])
	if err != nil {
		return err
	}
	end := time.Now().Add(time.Duration(seconds) * time.Second)
	var had, held atomic.Int64
	var wg sync.WaitGroup
	next := make(chan int)
	for range 64 {
		wg.Go(func() {
			var conns []net.Conn
			for range next {
				c, err := net.DialTimeout(network, addr, time.Until(end))
				if err != nil {
					continue
				}
				had.Add(1)
				if len(args[4]) > 0 {
					_ = c.SetWriteDeadline(end)
					_, _ = io.WriteString(c, args[4])
				}
				conns = append(conns, c)
				held.Add(1)
			}
			time.Sleep(time.Until(end))
			for _, c := range conns {
				_ = c.Close()
			}
		})
	}
	for i := 0; i < count && time.Now().Before(end); i++ {
		next <- i
	}
	close(next)
	wg.Wait()
	fmt.Printf("%d connections\n", had.Load())
	return nil
}

// openings are how well-behaved clients of each port begin; noise goes on from there, or breaks them.
func openings() [][]byte {
	hello := make([]byte, wire.HelloSize)
	(&wire.Hello{Version: 1, Kind: 1, Program: "noise"}).Encode((*[wire.HelloSize]byte)(hello))
	knock := make([]byte, 64)
	copy(knock, "SLUICE-L\x01\x00\x00\x00\x01")
	ticket := make([]byte, 64)
	copy(ticket, "SLUICE-D\x01\x00\x00\x00\x00")
	return [][]byte{
		{}, hello, knock, ticket,
		[]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"),
		[]byte("GET /metrics HTTP/1.1\r\nHost: x\r\n"),
		[]byte("POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n"),
		{0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3}, // a TLS ClientHello begins
	}
}

// noise NETWORK ADDR SECONDS SEED TLS talks nonsense, some connections at a time. With TLS it does so inside TLS too.
func noise(args []string) error {
	network, addr := args[0], args[1]
	seconds, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	seed, err := strconv.ParseUint(args[3], 10, 64)
	if err != nil {
		return err
	}
	end := time.Now().Add(time.Duration(seconds) * time.Second)
	begin := openings()
	var conns, written atomic.Int64
	var wg sync.WaitGroup
	for n := range 8 {
		r := mrand.New(mrand.NewPCG(seed, uint64(n)))
		wg.Go(func() {
			for time.Now().Before(end) {
				c, err := net.DialTimeout(network, addr, 2*time.Second)
				if err != nil {
					time.Sleep(5 * time.Millisecond)
					continue
				}
				conns.Add(1)
				_ = c.SetDeadline(time.Now().Add(300 * time.Millisecond))
				if args[4] == "tls" && r.IntN(2) == 0 {
					c = tls.Client(c, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
				}
				b := append([]byte(nil), begin[r.IntN(len(begin))]...)
				for range r.IntN(3) {
					if len(b) > 0 {
						b[r.IntN(len(b))] ^= byte(1 << r.IntN(8))
					}
				}
				for range r.IntN(1 << r.IntN(13)) {
					b = append(b, byte(r.Uint32()))
				}
				k, err := c.Write(b)
				written.Add(int64(k))
				if h, ok := c.(interface{ CloseWrite() error }); ok && r.IntN(4) > 0 {
					_ = h.CloseWrite()
				}
				if err == nil {
					_, _ = io.Copy(io.Discard, io.LimitReader(c, 1<<20))
				}
				if u, ok := c.(*net.UnixConn); ok && r.IntN(4) == 0 {
					// Descriptors where none belong.
					_, _, _ = u.WriteMsgUnix([]byte{0}, unix.UnixRights(0, 1, 2), nil)
				}
				_ = c.Close()
				if r.IntN(16) == 0 {
					time.Sleep(time.Millisecond)
				}
			}
		})
	}
	wg.Wait()
	fmt.Printf("%d connections, %d bytes\n", conns.Load(), written.Load())
	if conns.Load() == 0 {
		return errors.New("nobody could be reached")
	}
	_ = os.Stdout.Sync()
	return nil
}
