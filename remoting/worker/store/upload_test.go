package store

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// childEnv has this test program be a session: "DIR SHARED SEED SIZE LIMIT TOTAL". It begins an upload,
// says whether it is stored, and goes on at a line of its standard input.
const childEnv = "STORE_CHILD"

func TestMain(m *testing.M) {
	if v := os.Getenv(childEnv); v != "" {
		if err := child(strings.Fields(v)); err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func child(arg []string) error {
	gateTime = time.Minute
	var n [4]int64
	for i := range n {
		v, err := strconv.ParseInt(arg[2+i], 10, 64)
		if err != nil {
			return err
		}
		n[i] = v
	}
	b := Bounds{Limit: n[2], Total: n[3]}
	f, err := CreateShared(arg[1])
	if err != nil {
		return err
	}
	if b.Shared, err = OpenShared(f); err != nil {
		return err
	}
	s, err := Open(arg[0], b)
	if err != nil {
		return err
	}
	text := bytes.Repeat([]byte{byte(n[0])}, int(n[1]))
	u, err := s.Begin(Sum(sha256.Sum256(text)), uint64(len(text)))
	if err != nil {
		return err
	}
	if err := u.Write(0, text[:len(text)/2]); err != nil {
		return err
	}
	if u.Unstored() != nil {
		fmt.Println("unstored", u.Unstored())
	} else {
		fmt.Println("stored")
	}
	if _, err := fmt.Scanln(); err != nil {
		return nil
	}
	if err := u.Write(uint64(len(text)/2), text[len(text)/2:]); err != nil {
		return err
	}
	m, err := u.Commit()
	if err != nil || !bytes.Equal(m.Bytes(), text) {
		return fmt.Errorf("image differs, %v", err)
	}
	fmt.Println("done")
	return nil
}

type proc struct {
	*exec.Cmd
	in  *os.File
	out *bufio.Scanner
}

// line is the next line that a child says.
func (p *proc) line(t *testing.T) string {
	t.Helper()
	if !p.out.Scan() {
		t.Fatalf("a child ended: %v", p.out.Err())
	}
	return p.out.Text()
}

func start(t *testing.T, dir, shared string, seed, size, limit, total int) *proc {
	t.Helper()
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %d %d %d %d", childEnv, dir, shared, seed, size, limit, total))
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	c.Stdin = r
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	r.Close()
	t.Cleanup(func() {
		w.Close()
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	return &proc{c, w, bufio.NewScanner(out)}
}

// used is what a directory's file system has given away, in bytes.
func used(t *testing.T, dir string) int64 {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	return int64(st.Blocks-st.Bfree) * st.Bsize
}

// tmpfs mounts a small file system.
func tmpfs(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=700,size="+size); err != nil {
		t.Fatalf("tmpfs (these tests want root): %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

// 64 sessions upload at once, half of them of each of two users. Uploads under way count to the
// limit of their user and to that of all. Those beyond it go on without being stored, and those
// that are killed leave nothing.
func TestManyUploads(t *testing.T) {
	const size = 1 << 20
	for _, c := range []struct {
		name         string
		limit, total int
		sessions     int
		most         int // uploads stored at once
	}{
		{"limit of a user", 8 << 20, 1 << 30, 64, 16},
		{"total of all users", 1 << 30, 10 << 20, 24, 10},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := tmpfs(t, "512m")
			var all []*proc
			for i := range c.sessions {
				all = append(all, start(t, filepath.Join(dir, strconv.Itoa(i%2)), filepath.Join(dir, "shared"), i, size, c.limit, c.total))
			}
			stored := 0
			for _, p := range all {
				if p.line(t) == "stored" {
					stored++
				}
			}
			if stored != c.most {
				t.Errorf("%d of %d uploads are being stored, %d should be", stored, c.sessions, c.most)
			}
			if n := used(t, dir); n > int64(c.most)*size+1<<20 {
				t.Errorf("%d bytes are taken", n)
			}
			for i, p := range all {
				if i%4 < 2 {
					_ = p.Process.Kill()
					_ = p.Wait()
				} else if _, err := p.in.WriteString("\n"); err != nil {
					t.Error(err)
				} else if got := p.line(t); got != "done" {
					t.Error(got)
				}
			}
			for _, p := range all {
				_ = p.Wait()
			}
			var sum int64
			for _, u := range []string{"0", "1"} {
				names := entries(t, filepath.Join(dir, u))
				for _, n := range names {
					if !isImage(n) {
						t.Errorf("user %s: %s is left", u, n)
					}
				}
				sum += int64(len(names)) * size
			}
			if n := used(t, dir); n > sum+1<<20 {
				t.Errorf("%d bytes are taken for %d bytes of images", n, sum)
			}
			// All locks are gone with their processes: the next one is stored.
			if got := start(t, filepath.Join(dir, "0"), filepath.Join(dir, "shared"), 200, size, c.limit, c.total+c.limit).line(t); got != "stored" {
				t.Error(got)
			}
		})
	}
}

// A user's images make room for that user's next ones where the free space must be left. On a full disk no
// upload is stored; each goes on in memory, also one that was begun while there was room.
func TestDiskFull(t *testing.T) {
	dir := filepath.Join(tmpfs(t, "15m"), "i")
	s, err := Open(dir, Bounds{Limit: 1 << 30, KeepFree: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	upload := func(seed byte, n int, middle func()) *Image {
		t.Helper()
		text := bytes.Repeat([]byte{seed}, n)
		u, err := s.Begin(Sum(sha256.Sum256(text)), uint64(n))
		if err != nil {
			t.Fatal(err)
		}
		if err := u.Write(0, text[:n/2]); err != nil {
			t.Fatal(err)
		}
		if middle != nil {
			middle()
		}
		if err := u.Write(uint64(n/2), text[n/2:]); err != nil {
			t.Fatal(err)
		}
		m, err := u.Commit()
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(m.Bytes(), text) || m.mem[n] != 0 || m.Stored() != (u.Unstored() == nil) {
			t.Errorf("upload %d: image differs", seed)
		}
		return m
	}
	for i, want := range []int{1, 2, 3, 3, 3} { // three have room
		m := upload(byte(i), 3<<20, nil)
		if !m.Stored() || len(entries(t, dir)) != want {
			t.Errorf("image %d of 3 MiB is stored: %v, beside %v", i, m.Stored(), entries(t, dir))
		}
		m.Close()
	}
	// An image that has no room even without the user's others evicts none.
	m := upload(8, 12<<20, nil)
	if m.Stored() || len(entries(t, dir)) != 3 {
		t.Errorf("an image of 12 MiB is stored: %v, beside %v", m.Stored(), entries(t, dir))
	}
	m.Close()
	if n, err := free(dir); err != nil || n < 4<<20 {
		t.Errorf("%d bytes are free, %v", n, err)
	}
	// A file system that breaks its word in the middle of an upload, and then altogether.
	fill := func() {
		ballast, err := os.OpenFile(filepath.Join(filepath.Dir(dir), "ballast"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		for err == nil {
			_, err = ballast.Write(make([]byte, 1<<20))
		}
		ballast.Close()
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
	}
	m = upload(9, 1<<20, fill)
	m.Close()
	if _, err := s.evict(0); err != nil {
		t.Fatal(err)
	}
	fill()
	m = upload(10, 100, nil)
	if m.Stored() {
		t.Error("an image is stored on a full disk")
	}
	m.Close()
}

// An upload whose file cannot be written goes on in memory with what it had.
func TestSpill(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "i")
	s, err := Open(dir, Bounds{Limit: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	text := []byte("the first half and the second half")
	u, err := s.Begin(Sum(sha256.Sum256(text)), uint64(len(text)))
	if err != nil {
		t.Fatal(err)
	}
	if err := u.Write(0, text[:10]); err != nil {
		t.Fatal(err)
	}
	if err := u.spill(unix.EIO); err != nil {
		t.Fatal(err)
	}
	if err := u.Write(10, text[10:]); err != nil {
		t.Fatal(err)
	}
	m, err := u.Commit()
	if err != nil || !bytes.Equal(m.Bytes(), text) || m.Stored() || !errors.Is(u.Unstored(), unix.EIO) {
		t.Errorf("%v, stored %v, %v", err, m.Stored(), u.Unstored())
	}
	if got := entries(t, dir); len(got) > 0 {
		t.Errorf("left: %v", got)
	}
}

// Those who make the count of all images at the same time have one file; one of another size is mended.
func TestCreateShared(t *testing.T) {
	for _, size := range []int{-1, 10} {
		path := filepath.Join(t.TempDir(), "shared")
		if size >= 0 {
			if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
				t.Fatal(err)
			}
			f, err := CreateShared(path)
			if err != nil {
				t.Fatal(err)
			}
			f.Close()
		}
		var wg sync.WaitGroup
		inodes := make([]uint64, 16)
		for i := range inodes {
			wg.Go(func() {
				f, err := CreateShared(path)
				if err != nil {
					t.Error(err)
					return
				}
				defer f.Close()
				var st unix.Stat_t
				if err := unix.Fstat(int(f.Fd()), &st); err != nil || st.Size != sharedSize {
					t.Errorf("%d bytes, %v", st.Size, err)
				}
				inodes[i] = st.Ino
			})
		}
		wg.Wait()
		if slices.Min(inodes) != slices.Max(inodes) {
			t.Errorf("several files: %v", inodes)
		}
	}
}

// A session that cuts the count of all images short ends no other session and not the
// daemon. All go on with the same count.
func TestSharedCutShort(t *testing.T) {
	path := filepath.Join(t.TempDir(), "shared")
	open := func() *Shared {
		f, err := CreateShared(path)
		if err != nil {
			t.Fatal(err)
		}
		s, err := OpenShared(f)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		return s
	}
	daemon, session := open(), open()
	for i, look := range []func(){
		func() { session.add(1) },
		func() { session.stored() },
		func() { daemon.set(0) },
		func() { open() },
	} {
		daemon.set(1000)
		if err := os.Truncate(path, 0); err != nil {
			t.Fatal(err)
		}
		look()
		daemon.set(5000)
		session.add(1)
		if got := []int64{daemon.stored(), session.stored(), open().stored()}; !slices.Equal(got, []int64{5001, 5001, 5001}) {
			t.Errorf("%d: counts %v", i, got)
		}
	}
	// A file that cannot be mended holds up no session either.
	session.f.Close()
	if err := os.Truncate(path, 0); err != nil {
		t.Fatal(err)
	}
	session.add(1)
	b := Bounds{Limit: 1 << 20, Total: 1 << 20, Shared: session}
	if got := b.Total - b.Shared.stored(); got >= 0 {
		t.Errorf("room for %d bytes", got)
	}
}

// The sweep of all users' directories counts them, removes leftovers, and takes images of those who have most.
func TestKeeper(t *testing.T) {
	dir := t.TempDir()
	f, err := CreateShared(filepath.Join(dir, "count"))
	if err != nil {
		t.Fatal(err)
	}
	shared, err := OpenShared(f)
	if err != nil {
		t.Fatal(err)
	}
	defer shared.Close()
	b := Bounds{Limit: 1 << 20, Total: 20_000, Shared: shared}
	var users []*Store
	for i, n := range []int{9, 2} {
		s, err := Open(filepath.Join(dir, strconv.Itoa(i)), b)
		if err != nil {
			t.Fatal(err)
		}
		users = append(users, s)
		for k := range n {
			sum := put(t, s, bytes.Repeat([]byte{byte(k)}, 1000+i))
			at := time.Now().Add(time.Duration(k-20*(1+i)) * time.Minute) // the second user's are older
			if err := os.Chtimes(s.path(sum), at, at); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got := shared.stored(); got != 9*1000+2*1001 {
		t.Errorf("%d bytes counted", got)
	}
	if err := os.Chown(users[1].dir, 1, 1); err != nil {
		t.Fatalf("these tests want root: %v", err)
	}
	left := filepath.Join(dir, "0", leftover(Sum{}))
	if err := os.WriteFile(left, make([]byte, 5000), 0o600); err != nil {
		t.Fatal(err)
	}
	k := Keeper{Dir: dir, Total: 20_000, Shared: shared}
	if u, err := k.Sweep(time.Now().Add(-time.Hour)); err != nil || u.Images != 16_002 || shared.stored() != 16_002 {
		t.Errorf("%+v, %v", u, err)
	}
	if u, err := k.Sweep(time.Now().Add(time.Hour)); err != nil || u.Images != 11_002 || u.Free == 0 {
		t.Errorf("%+v, %v", u, err)
	}
	k.Total = 8000 // so 7200 are left
	u, err := k.Sweep(time.Now())
	if err != nil || u.Images != 7002 || shared.stored() != 7002 || len(entries(t, users[0].dir)) != 5 || len(entries(t, users[1].dir)) != 2 {
		t.Errorf("%+v, %v: %d and %d images are left", u, err, len(entries(t, users[0].dir)), len(entries(t, users[1].dir)))
	}
	for i := range 9 {
		_, err := users[0].Get(Sum(sha256.Sum256(bytes.Repeat([]byte{byte(i)}, 1000))), 1000)
		if (err == nil) != (i >= 4) {
			t.Errorf("image %d: %v", i, err)
		}
	}
	// What is stored of others counts.
	shared.set(19_500)
	up, err := users[1].Begin(Sum{1}, 1000)
	if err != nil || !errors.Is(up.Unstored(), ErrNoRoom) {
		t.Errorf("%v, %v", err, up.Unstored())
	}
	up.Abort()
}

// A file system that others have filled: images give way until enough is free for new ones, the oldest of
// those who have most first.
func TestKeeperKeepsFree(t *testing.T) {
	dir := tmpfs(t, "16m")
	f, err := CreateShared(filepath.Join(t.TempDir(), "count"))
	if err != nil {
		t.Fatal(err)
	}
	shared, err := OpenShared(f)
	if err != nil {
		t.Fatal(err)
	}
	defer shared.Close()
	b := Bounds{Limit: 1 << 30, Total: 1 << 30, KeepFree: 4 << 20, Shared: shared}
	s, err := Open(filepath.Join(dir, "0"), b)
	if err != nil {
		t.Fatal(err)
	}
	var sums []Sum
	for i := range 5 {
		sum := put(t, s, bytes.Repeat([]byte{byte(i)}, 1<<20))
		at := time.Now().Add(time.Duration(i-20) * time.Minute)
		if err := os.Chtimes(s.path(sum), at, at); err != nil {
			t.Fatal(err)
		}
		sums = append(sums, sum)
	}
	has, err := free(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ballast"), make([]byte, has-5<<19), 0o600); err != nil {
		t.Fatal(err) // 2.5 MiB are free then
	}
	k := Keeper{Dir: dir, Total: 1 << 30, KeepFree: b.KeepFree, Shared: shared}
	for range 2 { // the second sweep has nothing to do
		if u, err := k.Sweep(time.Now()); err != nil || u.Images != 3<<20 || u.Free != 9<<19 {
			t.Errorf("%+v, %v", u, err)
		}
	}
	for i, sum := range sums {
		m, err := s.Get(sum, 1<<20)
		if (err == nil) != (i >= 2) {
			t.Errorf("image %d: %v", i, err)
		}
		if err == nil {
			m.Close()
		}
	}
	// A user who had no images has room.
	other, err := Open(filepath.Join(dir, "1"), b)
	if err != nil {
		t.Fatal(err)
	}
	put(t, other, make([]byte, 100<<10))
}

// The sweep touches no file that is not the store's: in no directory that is not a uid's own, behind no
// link, and of no other name.
func TestKeeperSparesOthers(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	f, err := CreateShared(filepath.Join(t.TempDir(), "count"))
	if err != nil {
		t.Fatal(err)
	}
	shared, err := OpenShared(f)
	if err != nil {
		t.Fatal(err)
	}
	defer shared.Close()
	if err := os.Symlink(outside, filepath.Join(dir, "0")); err != nil {
		t.Fatal(err)
	}
	names := []string{"data.csv", leftover(Sum{}), Sum{}.String()}
	var stay []string
	for name, uid := range map[string]int{"alice": 1000, "1000": 1001, "01001": 1001, "1002": 1002} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(filepath.Join(dir, name), uid, uid); err != nil {
			t.Fatalf("these tests want root: %v", err)
		}
	}
	for _, d := range []string{dir, outside, filepath.Join(dir, "alice"), filepath.Join(dir, "1000"), filepath.Join(dir, "01001"), filepath.Join(dir, "1002")} {
		for _, name := range names {
			path := filepath.Join(d, name)
			if err := os.WriteFile(path, make([]byte, 1000), 0o600); err != nil {
				t.Fatal(err)
			}
			if filepath.Base(d) != "1002" || name == "data.csv" {
				stay = append(stay, path)
			}
		}
	}
	k := Keeper{Dir: dir, Total: 0, Shared: shared}
	if u, err := k.Sweep(time.Now().Add(time.Hour)); err != nil || u.Images != 0 {
		t.Errorf("%+v, %v", u, err)
	}
	for _, path := range stay {
		if _, err := os.Lstat(path); err != nil {
			t.Error(err)
		}
	}
	if got := entries(t, filepath.Join(dir, "1002")); !slices.Equal(got, names[:1]) {
		t.Errorf("left of the store's own files: %v", got)
	}
}

// Locks of several open files add up, whatever their order, and take hands out no more than there is.
func TestTally(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tally")
	open := func() *tally {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return &tally{f: f}
	}
	a, b, c := open(), open(), open()
	var spans []span
	for _, x := range []*tally{a, b, a, b, a} {
		s, err := x.take(10, 100)
		if err != nil {
			t.Fatal(err)
		}
		spans = append(spans, s)
	}
	a.drop(spans[2])
	if sum, end, err := c.others(); err != nil || sum != 40 || end != 50 {
		t.Errorf("%d bytes, end %d, %v", sum, end, err)
	}
	if _, err := c.take(61, 100); !errors.Is(err, errFull) {
		t.Errorf("101 of 100 taken: %v", err)
	}
	if s, err := c.take(60, 100); err != nil || s.at != 50 {
		t.Errorf("%v %v", s, err)
	}
	a.f.Close()
	if sum, _, err := b.others(); err != nil || sum != 60 {
		t.Errorf("%d bytes of others once one is gone, %v", sum, err)
	}
	// Many at once.
	var wg sync.WaitGroup
	var mu sync.Mutex
	got := 0
	for range 32 {
		x := open()
		wg.Go(func() {
			if _, err := x.take(10, 180); err == nil {
				mu.Lock()
				got++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if got != 10 {
		t.Errorf("%d times 10 bytes were given of 180, of which 80 had been", got)
	}
	// A process that holds the gate for good makes the others wait once in gateRest.
	x, y := open(), open()
	if err := x.lock(gate, unix.F_WRLCK); err != nil {
		t.Fatal(err)
	}
	for i, most := range []time.Duration{20 * gateTime, gateTime / 2} {
		began := time.Now()
		if _, err := y.take(1, 1000); err == nil || errors.Is(err, errFull) || time.Since(began) > most {
			t.Errorf("attempt %d: %v, %v", i, err, time.Since(began))
		}
	}
	if err := x.lock(gate, unix.F_UNLCK); err != nil {
		t.Fatal(err)
	}
	y.again = y.again.Add(-gateRest)
	if _, err := y.take(1, 1000); err != nil {
		t.Errorf("after the rest: %v", err)
	}
}

// A lock that fails for another reason than another lock is not taken for a full store: the log says
// why no image is stored. The kernel refuses write locks on a file that is open for reading (EBADF) as a file
// system without locks refuses all of them (ENOLCK).
func TestNoLocks(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "i")
	s, err := Open(dir, Bounds{Limit: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, tallyName)
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s.open.f = f
	for range 2 {
		u, err := s.Begin(Sum{1}, 1000)
		if err != nil {
			t.Fatal(err)
		}
		if why := u.Unstored(); !errors.Is(why, unix.EBADF) || errors.Is(why, ErrNoRoom) || !strings.Contains(why.Error(), "owner.store") {
			t.Errorf("not stored: %v", why)
		}
		u.Abort()
	}
}

// TestLater: while an image is being published, Get and Settle wait for it. Facts that were set before are found afterwards. No more
// than placing images are published at the same time.
func TestLater(t *testing.T) {
	putLater(t)
	s, err := Open(filepath.Join(t.TempDir(), "i"), Bounds{Limit: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	text := []byte("an image of which something is known")
	sum := Sum(sha256.Sum256(text))
	u, err := s.Begin(sum, uint64(len(text)))
	if err == nil {
		err = u.Write(0, text)
	}
	if err != nil {
		t.Fatal(err)
	}
	m, err := u.Commit()
	if err != nil || !bytes.Equal(m.Bytes(), text) || m.Stored() {
		t.Fatalf("%v, stored is %v", err, m.Stored())
	}
	s.SetFact(sum, m, "answer", 42)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(sum, uint64(len(text))); !errors.Is(err, ErrNotFound) {
		t.Errorf("before it is in its place: %v", err)
	}
	may := make(chan struct{})
	s.Later(sum, func() {
		<-may
		u.Publish()
	})
	for range placing - 1 {
		s.Later(Sum{1}, func() { <-may })
	}
	s.Settle(20 * time.Millisecond) // which ends
	got, more := make(chan *Image, 1), make(chan struct{})
	go func() {
		m, err := s.Get(sum, uint64(len(text)))
		if err != nil {
			t.Error(err)
		}
		got <- m
	}()
	go s.Later(Sum{2}, func() { close(more) })
	select {
	case <-got:
		t.Fatal("Get returned before the image was published")
	case <-more:
		t.Fatalf("more than %d images are being published", placing)
	case <-time.After(50 * time.Millisecond):
	}
	close(may)
	<-more
	m = <-got
	if m == nil || !m.Stored() || !bytes.Equal(m.Bytes(), text) {
		t.Fatal("another image")
	}
	if n, ok := m.Fact("answer"); n != 42 || !ok {
		t.Errorf("noted is %d, %v", n, ok)
	}
	_ = m.Close()
	s.Settle(time.Minute)
	if u.Unstored() != nil || s.late.n != 0 || len(s.late.sums) != 0 || s.open.bytes() != 0 {
		t.Errorf("left over: %v, %d, %v, %d", u.Unstored(), s.late.n, s.late.sums, s.open.bytes())
	}
}
