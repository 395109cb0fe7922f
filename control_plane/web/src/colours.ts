import { useEffect, useState } from "preact/hooks"

const DARK = matchMedia("(prefers-color-scheme: dark)")

/** Whether the page is dark at present: a canvas is drawn again when that changes. */
export function useDark(): boolean {
  const [isDark, set] = useState(DARK.matches)
  useEffect(() => {
    const tell = () => { set(DARK.matches) }
    DARK.addEventListener("change", tell)
    return () => { DARK.removeEventListener("change", tell) }
  }, [])
  return isDark
}

/** The page's colours for canvases: `light-dark()` is resolved by the style of an element. */
export function colours(node: HTMLElement): (name: string) => string {
  const found = new Map<string, string>()
  return name => {
    let colour = found.get(name)
    if (!colour) {
      const before = node.style.color
      node.style.color = `var(--${name})`
      colour = getComputedStyle(node).color
      node.style.color = before
      found.set(name, colour)
    }
    return colour
  }
}
