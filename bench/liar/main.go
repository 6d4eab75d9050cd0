// Command liar is a session that was taken over, for gpu-shares.sh --part theft: it writes lies into the schedule of a GPU,
// one after the other and again and again, until its standard input ends. It runs as root where the sessions of the GPU run.
//
// It prints the names of the lies that it tells, a JSON array in one line, and begins.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/turns/turnstest"
)

func main() {
	dir := flag.String("turns", "", "`DIR` of the schedule: turns in the owner's run_dir")
	own := flag.String("own", "", "the liar's `LEASE`")
	thief := flag.String("thief", "", "the `LEASE` that steals")
	victim := flag.String("victim", "", "the `LEASE` that is stolen from")
	part := flag.Int("part", 0, "which `PART` of the lies to tell, from 0")
	parts := flag.Int("parts", 1, "the `NUMBER` of parts")
	each := flag.Duration("each", 500*time.Millisecond, "`TIME` for which a lie is told before the next")
	flag.Parse()
	if err := run(*dir, *own, *thief, *victim, *part, *parts, *each); err != nil {
		fmt.Fprintf(os.Stderr, "liar: %v\n", err)
		os.Exit(1)
	}
}

func run(dir, own, thief, victim string, part, parts int, each time.Duration) error {
	var lies []turnstest.Lie
	var names []string
	for i, l := range turnstest.Lies[1:] { // the first is none
		if i%parts == part {
			lies, names = append(lies, l), append(names, l.Name)
		}
	}
	if len(lies) == 0 {
		return fmt.Errorf("part %d of %d has no lies", part, parts)
	}
	l, err := turnstest.OpenLiar(dir)
	if err != nil {
		return err
	}
	defer l.Close()
	b, err := turnstest.NewBoard(l, own, thief, victim)
	if err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(names); err != nil {
		return err
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	for i := 0; ; i++ {
		stop := lies[i%len(lies)].Told(b)
		select {
		case <-over:
			stop()
			return nil
		case <-time.After(each):
			stop()
		}
	}
}
