"use strict";
// Text of any length: highlighted programs, indented JSON, and very long text in pieces, on demand.
(() => {
  const { Toolyard } = window;
  const { el } = Toolyard;
  const WHOLE = 12000;
  const HEAD = 3000;
  const CHUNK = 20000;
  const HIGHLIGHTED = 100000;

  // Long texts -------------------------------------------------------------------------------------------------------

  // Split at line ends if possible; browsers lay out only the visible pieces.
  const chunks = (text) => {
    const found = [];
    for (let at = 0; at < text.length;) {
      const newline = text.lastIndexOf("\n", at + CHUNK);
      const end = text.length - at <= CHUNK ? text.length : newline > at ? newline + 1 : at + CHUNK;
      found.push(text.slice(at, end));
      at = end;
    }
    return found.map((part, index) => el("div.chunk", index < found.length - 1 ? part.replace(/\n$/, "") : part));
  };

  // The rest of a text, inserted when it is opened, or when a search matches it.
  const rest = (text, summary) => {
    const fold = el("details.long", el("summary", summary));
    fold.fill = () => {
      if (fold.children.length === 1) fold.append(el("div.block", chunks(text)));
    };
    fold.has = (pattern) => text.search(pattern) >= 0;
    fold.addEventListener("toggle", () => fold.open && fold.fill());
    return fold;
  };

  // `shown`: turns a text into what is inserted; a long rest is inserted as text only.
  Toolyard.long = (text, whole, shown = Toolyard.ansi) => {
    if (text.length <= WHOLE) return whole(shown(text));
    const newline = text.lastIndexOf("\n", HEAD);
    const head = newline > HEAD / 2 ? newline : HEAD;
    const summary = `${Toolyard.number(text.length - head)} more characters`;
    const left = text.slice(head).replace(/^\n/, "");
    return [whole(shown(text.slice(0, head))), rest(shown === exact ? left : Toolyard.withoutAnsi(left), summary)];
  };
  const exact = (text) => text;
  Toolyard.prose = (text) => Toolyard.long(text, (part) => el("div.prose.block", part));
  Toolyard.output = (text, kind = "result") => (text
    ? Toolyard.long(text, (part) => el(`pre.block.${kind}`, part), kind === "raw" ? exact : Toolyard.ansi)
    : el("pre.result", el("span.muted", "(empty)")));

  // Programs ---------------------------------------------------------------------------------------------------------
  // Small on purpose: unknown syntax stays plain.

  const WORDS = {
    python: `and as assert async await break case class continue def del elif else except False finally for from global if import
      in is lambda match None nonlocal not or pass raise return True try while with yield`,
    javascript: `async await break case catch class const continue default delete do else export extends false finally for
      function if import in instanceof let new null of return static super switch this throw true try typeof undefined var void
      while with yield`,
    cpp: `auto bool break case catch char class const constexpr continue default delete do double else enum explicit extern false
      float for friend if include inline int long namespace new nullptr operator private protected public return short signed
      sizeof static struct switch template this throw true try typedef typename union unsigned using virtual void volatile while`,
    bash: "case cd do done echo elif else esac exit export fi for function if in local return set then while",
    sql: `and as between by create delete distinct from group having in inner insert into is join left like limit not null on or
      order outer right select set table union update values where`,
    go: `break case chan const continue default defer else fallthrough false for func go goto if import interface map nil package
      range return select struct switch true type var`,
    rust: `as async await break const continue crate else enum extern false fn for if impl in let loop match mod move mut pub ref
      return Self self static struct super trait true type unsafe use where while`,
    java: `abstract boolean break byte case catch char class const continue default do double else enum extends false final
      finally float for if implements import instanceof int interface long native new null package private protected public
      return short static super switch this throw throws true try void while`,
    json: "true false null",
  };
  const KNOWN = new Map(Object.entries(WORDS).map(([name, words]) => [name, new Set(words.split(/\s+/))]));
  const SAME = new Map(Object.entries({
    py: "python", python3: "python", js: "javascript", ts: "javascript", typescript: "javascript", nodejs: "javascript",
    c: "cpp", "c++": "cpp", csharp: "java", kotlin: "java", scala: "java", sh: "bash", shell: "bash", zsh: "bash" }));
  const HASH = new Set(["python", "bash"]);
  const STRINGS = [
    /"""[\s\S]*?(?:"""|$)/, /'''[\s\S]*?(?:'''|$)/, /"(?:\\.|[^"\\\n])*"?/, /'(?:\\.|[^'\\\n])*'?/, /`(?:\\.|[^`\\])*`?/];
  const COMMENTS = [/#[^\n]*/, /\/\/[^\n]*/, /\/\*[\s\S]*?(?:\*\/|$)/, /--[^\n]*/];
  const either = (patterns) => `(${patterns.map((pattern) => pattern.source).join("|")})`;
  const PARTS = new RegExp(`${either(STRINGS)}|${either(COMMENTS)}|(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)`, "g");

  const isComment = (text, name) => {
    if (text[0] === "#") return HASH.has(name);
    if (text.startsWith("--")) return name === "sql";
    return !HASH.has(name) && name !== "sql" && name !== "json";
  };

  const highlighted = (source, name) => {
    const words = KNOWN.get(name);
    const shown = Toolyard.visible(source);
    const body = el("code");
    let at = 0;
    for (const part of shown.matchAll(PARTS)) {
      const [whole, text, comment, number, word] = part;
      const kind = text ? "text" : number ? "number" : words.has(word) ? "word"
        : comment && isComment(comment, name) ? "comment" : "";
      if (!kind) continue;
      body.append(shown.slice(at, part.index), el(`span.c-${kind}`, whole));
      at = part.index + whole.length;
    }
    body.append(shown.slice(at));
    return body;
  };

  Toolyard.code = (source, language) => {
    const name = SAME.get(language) || language || "";
    const plain = source.length > HIGHLIGHTED || !KNOWN.has(name);
    const body = plain ? Toolyard.long(source, (part) => el("pre.block", el("code", part)), exact)
      : el("pre.block", highlighted(source, name));
    return el("div.program", el("div.bar", el("span.muted", language || "text"), Toolyard.copyButton(source)), body);
  };

  // JSON -------------------------------------------------------------------------------------------------------------

  // Indents without decoding, so that numbers keep their digits. Lists of plain values stay on one line.
  Toolyard.indented = (text) => {
    const parts = text.match(/"(?:\\.|[^"\\])*"|[[\]{},:]|[^\s"[\]{},:]+/g) || [];
    const flat = (at) => {
      for (let next = at + 1; next < parts.length; next += 1) {
        if (parts[next] === "]" || parts[next] === "}") return true;
        if (parts[next] === "[" || parts[next] === "{") return false;
      }
      return false;
    };
    const lines = [];
    const inline = [];
    const line = (depth) => `\n${" ".repeat(2 * Math.min(depth, 100))}`;
    let depth = 0;
    parts.forEach((part, at) => {
      if (part === "[" || part === "{") {
        inline.push(parts[at + 1] === "]" || parts[at + 1] === "}" || (part === "[" && flat(at)));
        depth += 1;
        lines.push(part, inline.at(-1) ? "" : line(depth));
      } else if (part === "]" || part === "}") {
        depth = Math.max(depth - 1, 0);
        lines.push(inline.pop() ? "" : line(depth), part);
      } else if (part === ",") {
        lines.push(inline.at(-1) ? ", " : `,${line(depth)}`);
      } else {
        lines.push(part === ":" ? ": " : part);
      }
    });
    return lines.join("");
  };
  Toolyard.json = (value) => Toolyard.code(Toolyard.indented(JSON.stringify(value) ?? "null"), "json");
})();
