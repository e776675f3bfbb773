package main

import (
	"fmt"
	"os"
)

func main() {
	var mode string
	fmt.Scan(&mode)
	switch mode {
	case "files":
		data, _ := os.ReadFile("greeting.txt")
		fmt.Println(string(data))
	case "assert":
		if 1+1 != len(mode)-3 {
			panic("not three")
		}
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
