package main

import (
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestMode(t *testing.T) {
	var mode string
	fmt.Scan(&mode)
	switch mode {
	case "files":
		data, err := os.ReadFile("greeting.txt")
		assert.NoError(t, err)
		fmt.Println(string(data))
	case "assert":
		assert.Equal(t, 3, 1+1)
	case "loop":
		for {
		}
	case "eat":
		data := make([]byte, 1<<30)
		for i := range data {
			data[i] = 1
		}
		fmt.Println("survived", data[len(mode)])
	}
}
