package control

// The log of session processes. A session logs what its client causes, and a session that was taken over
// logs what it likes. So it has no descriptor of its starter's log: it writes to a pipe, and its starter writes each line
// to the log with the process that it is from, as one line of bounded length and at a bounded rate. A session
// whose starter has gone logs nothing any more.

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// Limits of what a session process logs. Its own limits are lower, see package worker.
const (
	logLine  = 4 << 10 // bytes of a line
	logBurst = 512     // lines at once, then one each second
	logPipe  = 1 << 20 // bytes that wait for a starter that is busy
)

// newLog makes the pipe of a session process.
func newLog() (read, write *os.File, err error) {
	if read, write, err = os.Pipe(); err != nil {
		return nil, nil, fmt.Errorf("session's log: %w", err)
	}
	_, _ = unix.FcntlInt(write.Fd(), unix.F_SETPIPE_SZ, logPipe) // or it has less
	return read, write, nil
}

// copyLog writes the lines of a session process to a log until the process has closed its end.
func copyLog(to io.Writer, from io.Reader, pid int) {
	r := bufio.NewReaderSize(from, logLine)
	left, at, skipped := logBurst, time.Now(), 0
	for {
		line, err := r.ReadSlice('\n')
		if n := int(time.Since(at) / time.Second); n > 0 {
			left, at = min(left+n, logBurst), at.Add(time.Duration(n)*time.Second)
		}
		switch {
		case len(bytes.TrimSpace(line)) == 0:
		case left == 0:
			skipped++
		default:
			left--
			_, _ = to.Write(mark(line, pid, skipped))
			skipped = 0
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}

// mark returns a line of a session's log with the process that it is from, and how many before it are missing. Its
// form, text or JSON, stays what it is.
func mark(line []byte, pid, skipped int) []byte {
	line = bytes.TrimRight(line, "\n")
	more := ""
	if json.Valid(line) && line[0] == '{' && line[len(line)-1] == '}' {
		line = line[:len(line)-1]
		if skipped > 0 {
			more = fmt.Sprintf(`,"skipped_lines":%d`, skipped)
		}
		sep := ","
		if len(bytes.TrimSpace(line)) == 1 {
			sep = ""
		}
		return fmt.Appendf(nil, "%s%s\"session_process\":%d%s}\n", line, sep, pid, more)
	}
	if skipped > 0 {
		more = " skipped_lines=" + strconv.Itoa(skipped)
	}
	return fmt.Appendf(nil, "%s session_process=%d%s\n", printable(line), pid, more)
}

// printable replaces what is not text: an admin may read the log on a terminal.
func printable(line []byte) []byte {
	out := make([]byte, 0, len(line))
	for len(line) > 0 {
		c, n := utf8.DecodeRune(line)
		if strconv.IsPrint(c) && !(c == utf8.RuneError && n == 1) {
			out = append(out, line[:n]...)
		} else {
			out = append(out, '?')
		}
		line = line[n:]
	}
	return out
}
