// Render a model card: headings, lists, tables and code of Markdown. HTML in it is shown as text.

const inline = text => text.split(/(`[^`]+`|\*\*[^*]+\*\*)/).filter(Boolean).map(part =>
  part.startsWith("`") && part.length > 2 ? element("code", {}, part.slice(1, -1)) : part.startsWith("**") && part.length > 4 ? element("strong", {}, part.slice(2, -2)) : part);

const cells = line => line.trim().replace(/^\||\|$/g, "").split("|").map(cell => cell.trim());

export function markdown(text) {
  const lines = text.split("\n"), elements = [];
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i], rest = pattern => { const matching = []; while (i < lines.length && pattern.test(lines[i])) matching.push(lines[i++]); i--; return matching; };
    if (line.startsWith("```")) {
      const code = [];
      while (++i < lines.length && !lines[i].startsWith("```")) code.push(lines[i]);
      elements.push(element("pre", { tabindex: 0, "aria-label": "text" }, element("code", {}, code.join("\n"))));
    } else if (/^#+ /.test(line)) elements.push(element("h3", {}, ...inline(line.replace(/^#+ /, ""))));
    else if (/^- /.test(line)) elements.push(element("ul", {}, ...rest(/^- /).map(item => element("li", {}, ...inline(item.slice(2))))));
    else if (/^\|/.test(line)) {
      const [head, , ...rows] = rest(/^\|/).map(cells);
      const row = (tag, all) => element("tr", {}, ...all.map(cell => element(tag, {}, ...inline(cell))));
      elements.push(element("div", { class: "scroll" }, element("table", {}, element("thead", {}, row("th", head)), element("tbody", {}, ...rows.map(all => row("td", all))))));
    } else if (line.trim()) elements.push(element("p", {}, ...inline(line)));
  }
  return elements;
}
