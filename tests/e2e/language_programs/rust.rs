use std::io::stdin;

fn main() {
    let mut line = String::new();
    stdin().read_line(&mut line).unwrap();
    match line.trim() {
        "files" => println!("{}", std::fs::read_to_string("greeting.txt").unwrap()),
        "assert" => assert_eq!(line.trim().len() - 4, 3),
        "loop" => loop {},
        "eat" => println!("survived {}", vec![1u8; 1 << 30][line.len()]),
        _ => {}
    }
}
