package unixsock

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"sync"
	"time"
)

// lookEvery is the time between two looks for a kept socket's path.
const lookEvery = 2 * time.Second

// Kept is a listener whose socket is made again if its path is removed, as by a program that cleans up a directory:
// processes that listen would not notice, and nobody could connect until they are restarted.
type Kept struct {
	path  string
	how   How
	again func(error)
	done  chan struct{}

	mu sync.Mutex
	l  *net.UnixListener
}

// Keep makes the socket at path like Listen, and makes it again within some seconds of its removal. Each time that happens again is
// called with nil, or, once until it succeeds, with the error. What somebody else has made at the path is left alone.
func Keep(path string, how How, again func(error)) (*Kept, error) {
	return keep(path, how, again, lookEvery)
}

func keep(path string, how How, again func(error), every time.Duration) (*Kept, error) {
	l, err := Listen(path, how)
	if err != nil {
		return nil, err
	}
	k := &Kept{path: path, how: how, again: again, done: make(chan struct{}), l: l}
	go k.look(every)
	return k, nil
}

// look makes the socket again when two looks in a row have found no path: clients that had connected before the removal have been
// accepted by then.
func (k *Kept) look(every time.Duration) {
	t := time.NewTicker(every)
	defer t.Stop()
	missing, told := false, false
	for {
		select {
		case <-k.done:
			return
		case <-t.C:
		}
		_, err := os.Lstat(k.path)
		gone := errors.Is(err, fs.ErrNotExist)
		if !gone || !missing {
			missing = gone
			continue
		}
		err = k.remake()
		if err == nil || !told {
			k.again(err)
		}
		told = err != nil
		missing = told
	}
}

func (k *Kept) remake() error {
	l, err := Listen(k.path, k.how)
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	select {
	case <-k.done: // closed meanwhile
		return l.Close()
	default:
	}
	old := k.l
	k.l = l
	return old.Close()
}

func (k *Kept) listener() *net.UnixListener {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.l
}

// AcceptUnix waits for the next connection.
func (k *Kept) AcceptUnix() (*net.UnixConn, error) {
	for {
		l := k.listener()
		c, err := l.AcceptUnix()
		if err == nil || !errors.Is(err, net.ErrClosed) || l == k.listener() {
			return c, err
		}
	}
}

// Accept is AcceptUnix for a net.Listener.
func (k *Kept) Accept() (net.Conn, error) {
	c, err := k.AcceptUnix()
	if err != nil {
		return nil, err // a nil *net.UnixConn would not be a nil net.Conn
	}
	return c, nil
}

// Close ends the listener. The path stays.
func (k *Kept) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	select {
	case <-k.done:
		return net.ErrClosed
	default:
	}
	close(k.done)
	return k.l.Close()
}

// Addr is the listener's address.
func (k *Kept) Addr() net.Addr { return k.listener().Addr() }
